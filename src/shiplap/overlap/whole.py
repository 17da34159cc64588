"""Methods that do not cut the GEMM: one after the other, or behind the GEMM that comes next.

`replicated` is tensor parallelism without sequence parallelism: every rank holds all tokens, so a gather is nothing and
a scatter is an all-reduce. `sequential` is the reference for all others.

In bulk, everything is started at once, and the caller has another GEMM to run before it waits. On Gloo the collectives
of two ranks use the two directions of a link partly one after the other; sends and receives, as `bulk_p2p` has them,
use both (docs/experiments.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Handle, SumHandle, all_gather, all_reduce, reduce_scatter, send_to_each
from shiplap.overlap.primitives import Consume, Kind, Method, Produce, Where


def _produced(produce: Produce, shape: torch.Size, like: Tensor) -> Tensor:
    out = like.new_empty(shape)
    produce(slice(0, shape[0]), out)
    return out


def _consume_replicated(x_sBH: Tensor, consume: Consume, *, group: Group, method: Method) -> Tensor:
    consume(slice(0, x_sBH.shape[0]), x_sBH)
    return x_sBH


def _all_reduce_produced(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    return Handle(all_reduce(_produced(produce, shape, like), group).wait())


REPLICATED = Kind(
    name="replicated",
    cut="whole",
    transport="collective",
    summary="without sequence parallelism: a gather is nothing, a scatter is an all-reduce",
    gather=_consume_replicated,
    scatter=_all_reduce_produced,
    prefetch=lambda x_sBH, group: Handle(x_sBH),
    overlaps=lambda method: False,
)


def _gather_then_consume(x_sBH: Tensor, consume: Consume, *, group: Group, method: Method) -> Tensor:
    x_SBH = all_gather(x_sBH, group).wait()
    consume(slice(0, x_SBH.shape[0]), x_SBH)
    return x_SBH


def _produce_then_scatter(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    return Handle(reduce_scatter(_produced(produce, shape, like), group).wait())


SEQUENTIAL = Kind(
    name="sequential",
    cut="whole",
    transport="collective",
    summary="one after the other; nothing overlaps",
    gather=_gather_then_consume,
    scatter=_produce_then_scatter,
    prefetch=lambda x_sBH, group: Handle(all_gather(x_sBH, group).wait()),
    overlaps=lambda method: False,
)


def _start_reduce_scatter(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    return reduce_scatter(_produced(produce, shape, like), group)


def _bulk_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    return [BULK.method()] if where in ("scatter beside wgrad", "second gather") else ()


BULK = Kind(
    name="bulk",
    cut="whole",
    transport="collective",
    summary="one collective, behind the GEMM next to it",
    scatter=_start_reduce_scatter,
    prefetch=all_gather,
    switches=("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad"),
    candidates=_bulk_candidates,
)


def _send_produced(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    """The parts are added once, in rank order and at least in float32."""
    assert group is not None, "sending needs a group"
    shards = _produced(produce, shape, like).split(shape[0] // group.size)
    parts = send_to_each(shards, group=group) | {group.rank: Handle(shards[group.rank])}
    return SumHandle([parts[rank] for rank in range(group.size)])


def _start_sending(x_sBH: Tensor, group: Group) -> Handle:
    assert group is not None, "sending needs a group"
    x_SBH = x_sBH.new_empty(group.size * x_sBH.shape[0], *x_sBH.shape[1:])
    shards = x_SBH.split(x_sBH.shape[0])
    own = shards[group.rank].copy_(x_sBH)
    arriving = send_to_each([own] * group.size, group=group, incoming=shards)
    return Handle(x_SBH, list(arriving.values()))


def _bulk_p2p_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    is_here = where in ("scatter beside wgrad", "second gather")
    return [BULK_P2P.method(), BULK_P2P.method(paced=True)] if is_here else ()


BULK_P2P = Kind(
    name="bulk_p2p",
    cut="whole",
    transport="p2p",
    summary="the same straight from rank to rank",
    scatter=_send_produced,
    prefetch=_start_sending,
    is_paceable=True,
    old_names=("direct",),
    candidates=_bulk_p2p_candidates,
)

KINDS = (REPLICATED, SEQUENTIAL, BULK, BULK_P2P)
