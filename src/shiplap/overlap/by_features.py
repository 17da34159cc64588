"""Pipelines by features: some features of all tokens travel while a GEMM runs.

A pipeline by rows makes GEMMs of few rows, each of which reads the whole weight. Here a GEMM has all rows and a
part of the weight, so that short sequences can be cut into several chunks. A gather's GEMMs are added up; a
scatter's are independent, as in DeepSpeed's Domino (Wang et al. 2024).

Nothing hides a gather's first chunk and a scatter's last one. With the own rows first, these, which need no
communication, are a GEMM of their own that does; the others' rows then have one or two GEMMs a chunk. That pays
where a shard has many rows.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shiplap.dist.collectives import ConcatHandle, Group, Handle, RankGroup, SumHandle, send_to_each
from shiplap.overlap.primitives import Consume, Kind, Method, Produce, Tile, Where

_WIDE = 64
_ALIGNED = 8
"""Features: GEMMs are efficient at multiples of the first, and the grouped ones of CUDA need multiples of the second
in bfloat16."""


def gather_and_consume(x_sBH: Tensor, consume: Consume, *, group: Group, method: Method) -> Tensor:
    """Send everything in chunks of features and consume them one by one, after the own rows if they come first."""
    assert group is not None, "sending needs a group"
    shard_rows = x_sBH.shape[0]
    x_SBH = x_sBH.new_empty(group.size * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[group.rank].copy_(x_sBH)
    arriving = []
    for features in feature_chunks(x_sBH.shape[-1], method.pieces):
        chunk = x_sBH[..., features].contiguous()
        arriving.append((features, send_to_each([chunk] * group.size, group=group)))
    own = _own_rows(group, shard_rows)
    if method.own_first:
        consume(own, x_SBH[own])
    for features, parts in arriving:
        for source, part in parts.items():
            shards[source][..., features] = part.wait()
        for rows in _others(own, len(x_SBH)) if method.own_first else [slice(0, len(x_SBH))]:
            consume(Tile(rows, features), x_SBH[rows][..., features])
    return x_SBH


def produce_and_scatter(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    """Produce chunks of features and start sending each; the own rows, if they are apart, come last."""
    assert group is not None, "sending needs a group"
    own = _own_rows(group, shape[0] // group.size)
    chunks: list[tuple[slice, dict[int, Handle]]] = []
    for features in feature_chunks(shape[-1], method.pieces):
        chunk = like.new_empty(*shape[:-1], features.stop - features.start)
        for rows in _others(own, shape[0]) if method.own_first else [slice(0, shape[0])]:
            produce(Tile(rows, features), chunk[rows])
        parts = send_to_each(chunk.split(shape[0] // group.size), group=group)
        chunks.append((features, parts | {group.rank: Handle(chunk[own])}))
    if method.own_first:
        # Of a gather's GEMMs the own rows are the first, of a scatter's the last: where nothing else would hide.
        own_sBH = like.new_empty(shape[0] // group.size, *shape[1:])
        produce(own, own_sBH)
        for features, parts in chunks:
            parts[group.rank] = Handle(own_sBH[..., features])
    return ConcatHandle([SumHandle([parts[rank] for rank in range(group.size)]) for _, parts in chunks])


def feature_chunks(width: int, numbers: Sequence[int]) -> list[slice]:
    """Chunks of these proportions, or that many equal ones if it is one number; fewer where there are few features."""
    proportions = [1] * numbers[0] if len(numbers) == 1 else list(numbers)
    unit = _WIDE if width >= _WIDE * len(proportions) else _ALIGNED
    ends = [total * (width // unit) // sum(proportions) * unit for total in accumulate(proportions)]
    ends[-1] = width
    return [slice(start, stop) for start, stop in pairwise((0, *ends)) if start < stop]


def _own_rows(group: RankGroup, shard_rows: int) -> slice:
    return slice(group.rank * shard_rows, (group.rank + 1) * shard_rows)


def _others(own: slice, num_rows: int) -> list[slice]:
    """The rows before the own ones, and those after them."""
    ranges = [slice(0, own.start), slice(own.stop, num_rows)]
    return [rows for rows in ranges if rows.start < rows.stop]


def _candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    """The chunk that nothing hides is a small one: a gather's first, a scatter's last."""
    method = FEATURE_CHUNKS.method
    match where:
        case "gather" | "gather for wgrad too":
            small_first = (1, 2, 2, 3)
            plain = [method(*small_first), method(8), method(own_first=True)]
            return [*plain, method(*small_first, paced=True), method(8, paced=True)]
        case "scatter":
            return [method(3, 2, 2, 1), method(8), method(own_first=True), method(8, paced=True)]
        case "scatter beside wgrad":
            # Its end hides behind wgrad, so how it is cut matters less.
            return [method(), method(paced=True)]
        case _:
            return ()


FEATURE_CHUNKS = Kind(
    name="feature_chunks",
    cut="by features",
    transport="p2p",
    summary="some features of all rows at a time, straight from rank to rank",
    gather=gather_and_consume,
    scatter=produce_and_scatter,
    pieces="number of chunks, or their proportions",
    default_pieces=(4,),
    example_pieces=(3, 2, 2, 1),
    takes_own_first=True,
    is_paceable=True,
    old_names=("columns", "tiles own_first"),
    candidates=_candidates,
    overlaps=lambda method: method.own_first or method.pieces != (1,),
)

KINDS = (FEATURE_CHUNKS,)
