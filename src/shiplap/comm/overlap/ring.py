"""All-gather/product as a ring: while a rank multiplies the shard that it holds, the next one arrives.

Wang et al. 2023, section 4 (there on TPUs). At step t, rank r multiplies shard r - t and sends it on to rank r + 1.
Every link carries one shard a step, so R - 1 steps move what an all-gather moves, each behind the product of the
shard before it.
"""

from collections.abc import Callable

from torch import Tensor

from shiplap.comm.collectives import Group, batch_send_recv, rank_in, size_of


def gather_and_consume(x_sBH: Tensor, consume: Callable[[slice, Tensor], None], group: Group) -> Tensor:
    """Pass the shards round the ring, consuming each as it comes by, the own one first."""
    assert group is not None, "a ring needs a group"
    num_ranks, rank, shard_rows = size_of(group), rank_in(group), x_sBH.shape[0]
    x_SBH = x_sBH.new_empty(num_ranks * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[rank].copy_(x_sBH)
    for step in range(num_ranks):
        held, arriving = (rank - step) % num_ranks, (rank - step - 1) % num_ranks
        exchange = None
        if step < num_ranks - 1:
            right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
            exchange = batch_send_recv(shards[held], right, shards[arriving], left, group=group)
        consume(slice(held * shard_rows, (held + 1) * shard_rows), shards[held])
        if exchange is not None:
            exchange.wait()
    return x_SBH
