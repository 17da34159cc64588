"""All-gather/product as a ring: while a rank multiplies what it holds, the next shard arrives.

Wang et al. 2023, section 4 (there on TPUs). Rank r multiplies its own shard, then r - 1, r - 2, …, and sends each on to
rank r + 1. Every link carries one shard a step, so R - 1 steps move what an all-gather moves, each behind the product
of the shard before it.

In chunks, a product begins when a part of a shard is there: with two ranks, and one chunk a shard, at most half of the
product can hide communication.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from shiplap.dist.collectives import Group, Pending, batch_send_recv, rank_in, size_of


def gather_and_consume(
    x_sBH: Tensor, consume: Callable[[slice, Tensor], None], group: Group, *, numbers: Sequence[int] = (1,)
) -> Tensor:
    """Pass the shards round the ring in `numbers[0]` chunks each, consuming each as it comes by, the own ones first."""
    assert group is not None, "a ring needs a group"
    (num_chunks,) = numbers
    num_ranks, rank, shard_rows = size_of(group), rank_in(group), x_sBH.shape[0]
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    x_SBH = x_sBH.new_empty(num_ranks * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[rank].copy_(x_sBH)
    # Rows of every chunk that this rank consumes, in that order. The k-th after those of the own shard arrives as
    # transfer k, and is sent on as the transfer one shard later.
    chunks = [
        slice(owner * shard_rows + start, owner * shard_rows + stop)
        for owner in ((rank - step) % num_ranks for step in range(num_ranks))
        for start, stop in chunk_bounds(shard_rows, num_chunks)
    ]
    per_shard = len(chunks) // num_ranks
    transfers: list[Pending] = []

    def start_transfer() -> None:
        number = len(transfers)
        if number + per_shard < len(chunks):
            outgoing, arriving = x_SBH[chunks[number]], x_SBH[chunks[number + per_shard]]
            transfers.append(batch_send_recv(outgoing, right, arriving, left, group=group))

    # A whole shard is on its way all the time: the link has work while products run.
    for _ in range(per_shard):
        start_transfer()
    for number, rows in enumerate(chunks):
        if number >= per_shard:
            transfers[number - per_shard].wait()
            start_transfer()
        consume(rows, x_SBH[rows])
    return x_SBH


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where so many chunks of as equal size as possible begin and end; none is empty."""
    count = min(num_chunks, num_rows)
    return [(i * num_rows // count, (i + 1) * num_rows // count) for i in range(count)]
