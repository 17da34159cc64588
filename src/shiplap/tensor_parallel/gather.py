"""Whole parameters on one rank, such as the one that writes a checkpoint."""

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, receive, send
from shiplap.tensor_parallel.placement import Shard


@torch.no_grad()
def gather_to_first(local: Tensor, shard: Shard | None, group: Group) -> Tensor | None:
    """The whole of a divided tensor on the group's first rank, which receives one shard after the other.

    All ranks must call this alike. Only the first holds more than it did: the whole, and one shard.

    Args:
        local: this rank's shard.
        shard: how the tensor is divided; None where every rank holds it whole.
        group: the ranks; their shards may differ in size.

    Returns:
        The whole tensor, on the CPU; on other ranks than the first None.
    """
    if group is not None and group.rank > 0:
        if shard is not None:
            send(local.detach().contiguous(), 0, group).wait()
        return None
    if shard is None:
        return local.detach().to("cpu", copy=True)
    num_shards = 1 if group is None else group.size
    whole = local.new_empty(shard.full_shape, device="cpu")
    shard.place(whole, local, 0, num_shards)
    if group is not None:
        for rank in range(1, num_shards):
            part = receive(local.new_empty(shard.shard_shape(rank, num_shards)), rank, group).wait()
            shard.place(whole, part, rank, num_shards)
    return whole
