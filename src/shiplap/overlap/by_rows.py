"""Product/reduce-scatter in a few uneven pieces of all shards at once, each one product and one collective.

A pipeline over destinations launches a product for each, which wastes the device where a product is short. Here piece
k is the same rows of every rank's shard: one strided-batched product without a copy, whose result is reduce-scattered
while the next piece is computed. The last piece has nothing to hide behind, so it is a small one.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, reduce_scatter, size_of
from shiplap.overlap.regions import ShardRows


def produce_and_scatter(
    produce: Callable[[ShardRows, Tensor], None],
    shape: torch.Size,
    like: Tensor,
    group: Group,
    *,
    numbers: Sequence[int] = (2, 1, 1),
) -> Pending:
    """Produce and scatter pieces whose sizes are to each other as the numbers are."""
    num_ranks = size_of(group)
    shard_rows = shape[0] // num_ranks
    own_sBH = like.new_empty(shard_rows, *shape[1:])
    scatters = []
    for start, stop in piece_bounds(shard_rows, numbers):
        piece = like.new_empty(num_ranks, stop - start, *shape[1:])
        produce(ShardRows(num_ranks, start, stop), piece)
        scatters.append(reduce_scatter(piece.flatten(0, 1), group, out=own_sBH[start:stop]))
    return Pending(own_sBH, scatters)


def piece_bounds(num_rows: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where pieces of these relative sizes begin and end; none is empty."""
    ends = [total * num_rows // sum(sizes) for total in accumulate(sizes)]
    return [(start, stop) for start, stop in pairwise((0, *ends)) if start < stop]
