"""GEMM/reduce-scatter in a few uneven pieces of all shards at once, each one GEMM and one collective.

A pipeline over destinations launches a GEMM for each, which wastes the device where a GEMM is short. Here piece k is
the same rows of every rank's shard: one strided-batched GEMM without a copy, whose result is reduce-scattered while the
next piece is computed. The last piece has nothing to hide behind, so it is a small one.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Handle, reduce_scatter, size_of
from shiplap.overlap.primitives import Kind, Method, Produce, ShardRows, Where


def produce_and_scatter(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    """Produce and scatter chunks whose sizes are to each other as the method's numbers are."""
    num_ranks = size_of(group)
    shard_rows = shape[0] // num_ranks
    own_sBH = like.new_empty(shard_rows, *shape[1:])
    scatters = []
    for start, stop in chunk_bounds(shard_rows, method.pieces):
        chunk = like.new_empty(num_ranks, stop - start, *shape[1:])
        produce(ShardRows(num_ranks, start, stop), chunk)
        scatters.append(reduce_scatter(chunk.flatten(0, 1), group, out=own_sBH[start:stop]))
    return Handle(own_sBH, scatters)


def chunk_bounds(num_rows: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Begins and ends of chunks of these relative sizes; none is empty."""
    ends = [total * num_rows // sum(sizes) for total in accumulate(sizes)]
    return [(start, stop) for start, stop in pairwise((0, *ends)) if start < stop]


def _candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    return [ROW_CHUNKS.method()] if where in ("scatter", "scatter beside wgrad") else ()


ROW_CHUNKS = Kind(
    name="row_chunks",
    cut="by rows",
    transport="collective",
    summary="some rows of all shards at a time: a GEMM, a collective",
    scatter=produce_and_scatter,
    pieces="proportions of the chunks",
    default_pieces=(2, 1, 1),
    example_pieces=(1, 3),
    old_names=("pieces",),
    candidates=_candidates,
    overlaps=lambda method: len(method.pieces) > 1,
)

KINDS = (ROW_CHUNKS,)
