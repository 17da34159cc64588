"""Product/reduce-scatter by direct exchange: a finished shard goes straight to its rank while the next is computed.

At step i, rank r produces the rows of rank r + i and sends them there, while those of rank r - i for it arrive: every
step has other peers, and every link carries each shard once. The own rows come last, behind the last sends. The parts
are added once, in rank order and at least in float32: the sum does not depend on timing, and bfloat16 is rounded once,
not per hop.

In chunks, the first part of a shard is on its way before the rest of it is made.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, PendingSum, batch_send_recv, rank_in, size_of
from shiplap.overlap.by_shard import chunk_bounds


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None],
    shape: torch.Size,
    like: Tensor,
    group: Group,
    *,
    numbers: Sequence[int] = (1,),
) -> Pending:
    """Produce the rows of the next rank and start sending them, then those of the one after it, the own rows last."""
    assert group is not None, "an exchange needs a group"
    (num_chunks,) = numbers
    num_ranks, rank = size_of(group), rank_in(group)
    shard_rows = shape[0] // num_ranks
    parts: dict[int, Pending] = {}
    for step in range(1, num_ranks):
        destination, source = (rank + step) % num_ranks, (rank - step) % num_ranks
        outgoing, incoming = (like.new_empty(shard_rows, *shape[1:]) for _ in range(2))
        exchanges = []
        for start, stop in chunk_bounds(shard_rows, num_chunks):
            first = destination * shard_rows
            produce(slice(first + start, first + stop), outgoing[start:stop])
            exchanges.append(
                batch_send_recv(outgoing[start:stop], destination, incoming[start:stop], source, group=group)
            )
        parts[source] = Pending(incoming, exchanges)
    own_sBH = like.new_empty(shard_rows, *shape[1:])
    produce(slice(rank * shard_rows, (rank + 1) * shard_rows), own_sBH)
    parts[rank] = Pending(own_sBH)
    return PendingSum([parts[source] for source in range(num_ranks)])
