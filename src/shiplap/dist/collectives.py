"""The communication of the hot path, along dim 0, over one process group. The only torch.distributed calls there.

Every function starts its communication and returns at once with a `Pending`; blocking is `.wait()` right away. All
ranks of a group must call the same functions in the same order. `group=None` stands for a group of this rank alone.

Shapes: `x_sBH` is this rank's shard `[S/R, …]`, `x_SBH` the whole `[S, …]`, R the group's size.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shiplap.dist.exposed import one_wait
from shiplap.dist.hooks import Watch, told_of
from shiplap.dist.group import RankGroup
from shiplap.dist.pacing import Work

Group = RankGroup | None
MAX = dist.ReduceOp.MAX
AnyGroup = RankGroup | dist.ProcessGroup | None


def as_group(group: AnyGroup) -> Group:
    """What a caller gave as a group: ours, torch's own, or None."""
    return RankGroup(group) if isinstance(group, dist.ProcessGroup) else group


# PyTorch 2.13 renamed the two collectives and warns about the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A tensor that communication is still filling in.

    On CUDA `wait` orders the current stream after the communication; on Gloo it blocks the host. Until then it
    holds the buffers that the communication reads, so that they are neither reused nor kept longer than needed:
    the order comes from events, without `record_stream`.
    """

    def __init__(self, value: Tensor, works: Sequence[Work] = (), reads: Sequence[Tensor] = ()) -> None:
        """A value, the communications that it waits for, and the buffers that they read."""
        self._value = value
        self._works = works
        self._reads = reads

    def wait(self) -> Tensor:
        """The finished tensor."""
        if self._works:
            with one_wait():
                for work in self._works:
                    work.wait()
        self._works = self._reads = ()
        return self._value

    def watched(self, watch: Watch) -> Self:
        """The same, waiting for what `watch` makes of the communications, if there are any."""
        self._works = watch(self._works) if self._works else ()
        return self


class PendingSum(Pending):
    """The sum of several tensors of one shape, some of them still on their way."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        """The parts, in the order in which they are added; they must be of one dtype and device."""
        self._parts = parts

    def wait(self) -> Tensor:
        """The sum, added up in float32 at least and rounded once, in the parts' dtype."""
        first, *others = [part.wait() for part in self._parts]
        total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        self._parts = ()
        return total.to(first.dtype)


class PendingColumns(Pending):
    """Tensors that are the columns, from left to right, of one, some of them still on their way."""

    def __init__(self, pieces: Sequence[Pending]) -> None:
        """The pieces; they must be alike but in their last dim."""
        self._pieces = pieces

    def wait(self) -> Tensor:
        """All columns."""
        whole = torch.cat([piece.wait() for piece in self._pieces], dim=-1)
        self._pieces = ()
        return whole


def size_of(group: Group) -> int:
    """Number of ranks in the group."""
    return 1 if group is None else group.size


def rank_in(group: Group) -> int:
    """This rank's place in the group."""
    return 0 if group is None else group.rank


@told_of("all-gather")
def all_gather(x_sBH: Tensor, group: Group) -> Pending:
    """Start gathering the shards `[S/R, …]` of all ranks, in rank order, into `[S, …]`."""
    if group is None:
        return Pending(x_sBH)
    x_sBH = x_sBH.contiguous()
    x_SBH = x_sBH.new_empty(size_of(group) * x_sBH.shape[0], *x_sBH.shape[1:])
    work = _all_gather_single(x_SBH, x_sBH, group=group.process_group, async_op=True)
    return Pending(x_SBH, [work], [x_sBH])


@told_of("reduce-scatter")
def reduce_scatter(x_SBH: Tensor, group: Group, *, out: Tensor | None = None) -> Pending:
    """Start summing `[S, …]` over the ranks; each gets its rows `[S/R, …]` of the sum, in `out` if that is given."""
    if group is None:
        return Pending(x_SBH if out is None else out.copy_(x_SBH))
    x_SBH = x_SBH.contiguous()
    x_sBH = x_SBH.new_empty(x_SBH.shape[0] // size_of(group), *x_SBH.shape[1:]) if out is None else out
    work = _reduce_scatter_single(x_sBH, x_SBH, group=group.process_group, async_op=True)
    return Pending(x_sBH, [work], [x_SBH])


@told_of("all-reduce")
def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Start summing `x` over the ranks, in place; every rank gets the sum."""
    if group is None:
        return Pending(x)
    return Pending(x, [dist.all_reduce(x, op=op, group=group.process_group, async_op=True)])


@told_of("reduce")
def reduce(x: Tensor, destination: int, group: Group) -> Pending:
    """Start summing `x` over the ranks, in place, into rank `destination` of the group; elsewhere `x` is scratch."""
    if group is None:
        return Pending(x)
    return Pending(x, [dist.reduce(x, group_dst=destination, group=group.process_group, async_op=True)])


@told_of("broadcast")
def broadcast(x: Tensor, source: int, group: Group) -> Pending:
    """Start copying `x` from rank `source` of the group to all others, in place; there it is overwritten."""
    if group is None:
        return Pending(x)
    return Pending(x, [dist.broadcast(x, group_src=source, group=group.process_group, async_op=True)])


@told_of("send")
def send(x: Tensor, to: int, group: RankGroup) -> Pending:
    """Start sending `x` to rank `to` of the group, which must `receive` it."""
    return Pending(x, _alone(dist.P2POp(dist.isend, x, group=group.process_group, group_peer=to)))


@told_of("receive")
def receive(x: Tensor, source: int, group: RankGroup) -> Pending:
    """Start filling `x` with what rank `source` of the group sends."""
    return Pending(x, _alone(dist.P2POp(dist.irecv, x, group=group.process_group, group_peer=source)))


def _alone(operation: dist.P2POp) -> list[dist.Work]:
    # As a batch of one: NCCL makes a communicator of its own for a pair of ranks that does anything else.
    return dist.batch_isend_irecv([operation])


@told_of("send and receive")
def batch_send_recv(outgoing: Tensor, to: int, incoming: Tensor, source: int, *, group: RankGroup) -> Pending:
    """Start sending `outgoing` to rank `to` of the group while receiving `incoming` from rank `source`."""
    turns = None if incoming.is_cuda else group.turns
    # Messages that wait for their turn have a tag of their own: the others do not wait for them.
    tag = 0 if turns is None else 1
    # The receive comes first. Gloo sends only to who has said that it receives, and says so on the same connection as
    # the data: behind an outgoing tensor the peer would hear of it late, and both directions would take turns.
    operations = [
        dist.P2POp(dist.irecv, incoming, group=group.process_group, group_peer=source, tag=tag),
        dist.P2POp(dist.isend, outgoing, group=group.process_group, group_peer=to, tag=tag),
    ]
    if turns is None:
        return Pending(incoming, dist.batch_isend_irecv(operations), [outgoing])
    return Pending(incoming, [turns.take(lambda: dist.batch_isend_irecv(operations))], [outgoing])


def send_to_each(
    outgoing: Sequence[Tensor], *, group: RankGroup, incoming: Sequence[Tensor] | None = None
) -> dict[int, Pending]:
    """Start sending each of the other ranks its tensor of `outgoing`, the next one first, and receiving theirs.

    Args:
        outgoing: a tensor for each rank; the own one stays where it is.
        group: the ranks.
        incoming: where to, a tensor for each rank. Default: new memory.

    Returns:
        What comes from each of the others, by rank.
    """
    parts: dict[int, Pending] = {}
    for distance in range(1, group.size):
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        into = torch.empty_like(outgoing[to]) if incoming is None else incoming[source]
        parts[source] = batch_send_recv(outgoing[to], to, into, source, group=group)
    return parts


def all_gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Gather shards `[…, V/R]` of all ranks into `[…, V]`, and wait for them."""
    if group is None:
        return x
    parts = all_gather(x.unsqueeze(0), group).wait()
    return torch.cat(tuple(parts), dim=-1)
