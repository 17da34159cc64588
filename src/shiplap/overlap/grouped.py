"""All-gather/product with few, uneven products: the own shard first, then more and more of what has arrived at once.

One product per shard launches many small ones, which waste the device where a product is short. Here shards come
straight from their ranks, those of the next group behind the product of this one: with groups of 1, 1, 2, 4 shards
eight ranks need four products, and each hides what is twice its size at most.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shiplap.dist.collectives import Group, Pending, batch_send_recv, rank_in, size_of


def gather_and_consume(
    x_sBH: Tensor, consume: Callable[[slice, Tensor], None], group: Group, *, numbers: Sequence[int] = ()
) -> Tensor:
    """Consume the own shard and `numbers[0] - 1` others at once, then the next `numbers[1]`, and so on.

    Raises:
        ValueError: the numbers do not add up to that of the ranks.
    """
    assert group is not None, "groups of shards need a group of ranks"
    num_ranks, rank, shard_rows = size_of(group), rank_in(group), x_sBH.shape[0]
    sizes = tuple(numbers) or doubling(num_ranks)
    if sum(sizes) != num_ranks or min(sizes) < 1:
        raise ValueError(f"Groups of {', '.join(map(str, sizes))} shards do not make {num_ranks}, one for each rank.")
    x_SBH = x_sBH.new_empty(num_ranks * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[rank].copy_(x_sBH)

    def start(distances: range) -> list[Pending]:
        """Exchange with the ranks at these distances; what comes from distance i is the shard of rank - i."""
        peers = [((rank + i) % num_ranks, (rank - i) % num_ranks) for i in distances if i > 0]
        return [batch_send_recv(shards[rank], to, shards[source], source, group=group) for to, source in peers]

    groups = list(_groups(sizes))
    pending = start(groups[0])
    for distances, following in zip(groups, [*groups[1:], range(0)], strict=True):
        for exchange in pending:
            exchange.wait()
        pending = start(following)
        for first, last in _runs([(rank - i) % num_ranks for i in distances]):
            rows = slice(first * shard_rows, (last + 1) * shard_rows)
            consume(rows, x_SBH[rows])
    return x_SBH


def doubling(num_ranks: int) -> tuple[int, ...]:
    """1, 1, 2, 4, … shards, the last group what is left."""
    sizes = [1]
    while sum(sizes) < num_ranks:
        sizes.append(min(sum(sizes), num_ranks - sum(sizes)))
    return tuple(sizes)


def _groups(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of neighbours among ranks that count down, and may pass 0: the first and last of each."""
    last = first = ranks[0]
    for rank in ranks[1:]:
        if rank != first - 1:
            yield first, last
            last = rank
        first = rank
    yield first, last
