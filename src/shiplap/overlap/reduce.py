"""Product/reduce-scatter, one destination at a time: a finished shard is reduced while the next is computed.

Each shard has a buffer of its own, so that what stays after the call is this rank's shard and nothing else.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, rank_in, reduce, size_of


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce the rows of rank 0 and start their reduction to it, then those of rank 1, and so on.

    All ranks take the destinations in the same order, as collectives demand.
    """
    num_ranks, rank = size_of(group), rank_in(group)
    shard_rows = shape[0] // num_ranks
    shards, reductions = [], []
    for destination in range(num_ranks):
        shard_sBH = like.new_empty(shard_rows, *shape[1:])
        produce(slice(destination * shard_rows, (destination + 1) * shard_rows), shard_sBH)
        reductions.append(reduce(shard_sBH, destination, group))
        shards.append(shard_sBH)
    return Pending(shards[rank], reductions, shards)
