"""Product/reduce-scatter by direct exchange: a finished shard goes straight to its rank while the next is computed.

At step i, rank r produces the rows of rank r + i and sends them there, while those of rank r - i for it arrive: every
step has other peers, and every link carries each shard once. The own rows come last, behind the last sends. The parts
are added once, in rank order and at least in float32: the sum does not depend on timing, and bfloat16 is rounded once,
not per hop.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.comm.collectives import Group, Pending, PendingSum, batch_send_recv, rank_in, size_of


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce the rows of the next rank and start sending them, then those of the one after it, the own rows last."""
    assert group is not None, "an exchange needs a group"
    num_ranks, rank = size_of(group), rank_in(group)
    shard_rows = shape[0] // num_ranks

    def new_part(destination: int) -> Tensor:
        part_sBH = like.new_empty(shard_rows, *shape[1:])
        produce(slice(destination * shard_rows, (destination + 1) * shard_rows), part_sBH)
        return part_sBH

    exchanges: dict[int, Pending] = {}
    for step in range(1, num_ranks):
        destination, source = (rank + step) % num_ranks, (rank - step) % num_ranks
        outgoing = new_part(destination)
        exchanges[source] = batch_send_recv(outgoing, destination, torch.empty_like(outgoing), source, group=group)
    exchanges[rank] = Pending(new_part(rank))
    return PendingSum([exchanges[source] for source in range(num_ranks)])
