"""Bulk overlap straight from rank to rank: everything is sent at once, behind another product, by no collective.

On Gloo the collectives of two ranks use the two directions of a link partly in turns; sends and receives use both
(docs/experiments.md). A scatter's parts are added once, in rank order and at least in float32, as with `exchange`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, PendingSum, send_to_each


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce everything at once, then start sending each rank its rows."""
    assert group is not None, "sending needs a group"
    out_SBH = like.new_empty(shape)
    produce(slice(0, shape[0]), out_SBH)
    shards = out_SBH.split(shape[0] // group.size)
    parts = send_to_each(shards, group=group) | {group.rank: Pending(shards[group.rank])}
    return PendingSum([parts[rank] for rank in range(group.size)])


def prefetch(x_sBH: Tensor, group: Group) -> Pending:
    """Start sending the own shard to every rank, and receiving theirs."""
    assert group is not None, "sending needs a group"
    x_SBH = x_sBH.new_empty(group.size * x_sBH.shape[0], *x_sBH.shape[1:])
    shards = x_SBH.split(x_sBH.shape[0])
    own = shards[group.rank].copy_(x_sBH)
    arriving = send_to_each([own] * group.size, group=group, incoming=shards)
    return Pending(x_SBH, list(arriving.values()))
