"""Bulk overlap straight from rank to rank: everything is sent at once, behind another product, by no collective.

On Gloo the collectives of two ranks use the two directions of a link partly in turns; sends and receives use both
(docs/experiments.md). A scatter's parts are added once, in rank order and at least in float32, as with `exchange`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.comm.collectives import Group, Pending, PendingSum, batch_send_recv, rank_in, size_of


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce everything at once, then start sending each rank its rows."""
    assert group is not None, "sending needs a group"
    num_ranks, rank = size_of(group), rank_in(group)
    out_SBH = like.new_empty(shape)
    produce(slice(0, shape[0]), out_SBH)
    shards = out_SBH.split(shape[0] // num_ranks)
    parts = {rank: Pending(shards[rank])}
    for distance in range(1, num_ranks):
        to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        parts[source] = batch_send_recv(shards[to], to, torch.empty_like(shards[to]), source, group=group)
    return PendingSum([parts[source] for source in range(num_ranks)])


def prefetch(x_sBH: Tensor, group: Group) -> Pending:
    """Start sending the own shard to every rank, and receiving theirs."""
    assert group is not None, "sending needs a group"
    num_ranks, rank = size_of(group), rank_in(group)
    x_SBH = x_sBH.new_empty(num_ranks * x_sBH.shape[0], *x_sBH.shape[1:])
    shards = x_SBH.split(x_sBH.shape[0])
    shards[rank].copy_(x_sBH)
    exchanges = [
        batch_send_recv(shards[rank], (rank + distance) % num_ranks, shards[source], source, group=group)
        for distance, source in ((i, (rank - i) % num_ranks) for i in range(1, num_ranks))
    ]
    return Pending(x_SBH, exchanges)
