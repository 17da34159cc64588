"""Pipelines by shard: while a rank multiplies one rank's rows, those of another are on their way.

*Ring* (Wang et al. 2023, section 4, there on TPUs): rank r multiplies its own shard, then r - 1, r - 2, …, and sends
each on to rank r + 1. Every link carries one shard a step, so R - 1 steps move what an all-gather moves, each behind
the GEMM of the shard before it. With two ranks, and one chunk a shard, at most half of the GEMM can hide communication;
in chunks, a GEMM begins when a part of a shard is there.

*Shards per GEMM*: one GEMM per shard launches many small ones, which waste the device where a GEMM is short. Here
shards come straight from their ranks, those of the next GEMM behind this one: with 1, 1, 2, 4 shards eight ranks need
four GEMMs, and each hides at most twice its own size.

*P2p*: at step i, rank r produces the rows of rank r + i and sends them there, while those of rank r - i for it arrive:
every step has other peers, and every link carries each shard once. The own rows come last, behind the last sends. The
parts are added once, in rank order and at least in float32: the sum does not depend on timing, and bfloat16 is rounded
once, not per hop. In chunks, the first part of a shard is on its way before the rest of it is made.

*Reduce*: a reduction to each rank in turn. All ranks take the destinations in the same order, as collectives demand,
so that one rank's own shard comes first and hides nothing (docs/experiments.md).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Handle, SumHandle, batch_send_recv, rank_in, reduce, size_of
from shiplap.overlap.primitives import Consume, Kind, Method, Produce, Where


def _ring(x_sBH: Tensor, consume: Consume, *, group: Group, method: Method) -> Tensor:
    """Pass the shards round the ring in chunks, consuming each as it comes by, the own ones first."""
    assert group is not None, "a ring needs a group"
    (num_chunks,) = method.pieces
    num_ranks, rank, shard_rows = group.size, group.rank, x_sBH.shape[0]
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
    transfers: list[Handle] = []

    def start_transfer() -> None:
        number = len(transfers)
        if number + per_shard < len(chunks):
            outgoing, arriving = x_SBH[chunks[number]], x_SBH[chunks[number + per_shard]]
            transfers.append(batch_send_recv(outgoing, right, arriving, left, group=group))

    # A whole shard is on its way all the time: the link has work while GEMMs run.
    for _ in range(per_shard):
        start_transfer()
    for number, rows in enumerate(chunks):
        if number >= per_shard:
            transfers[number - per_shard].wait()
            start_transfer()
        consume(rows, x_SBH[rows])
    return x_SBH


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Begins and ends of chunks of as equal size as possible; none is empty."""
    count = min(num_chunks, num_rows)
    return [(i * num_rows // count, (i + 1) * num_rows // count) for i in range(count)]


def _ring_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    """At TP 2 chunks are what helps."""
    match where:
        case "gather":
            return [RING.method(), *((RING.method(2), RING.method(4)) if num_ranks == 2 else ())]
        case "gather for wgrad too":
            return [RING.method(), *((RING.method(2),) if num_ranks == 2 else ())]
        case "second gather":
            return [RING.method()]
        case _:
            return ()


RING = Kind(
    name="ring",
    cut="by shard",
    transport="p2p",
    summary="round a ring, each shard behind the GEMM of the shard before it",
    gather=_ring,
    pieces="chunks of a shard",
    default_pieces=(1,),
    example_pieces=(2,),
    is_paceable=True,
    switches=("tp_comm_overlap_ag",),
    candidates=_ring_candidates,
)


def _gather_in_groups(x_sBH: Tensor, consume: Consume, *, group: Group, method: Method) -> Tensor:
    """Consume the own shard and `pieces[0] - 1` others at once, then the next `pieces[1]`, and so on.

    Raises:
        ValueError: the numbers do not add up to that of the ranks.
    """
    assert group is not None, "sending needs a group"
    num_ranks, rank, shard_rows = group.size, group.rank, x_sBH.shape[0]
    sizes = method.pieces or doubling(num_ranks)
    if sum(sizes) != num_ranks or min(sizes) < 1:
        raise ValueError(f"GEMMs of {', '.join(map(str, sizes))} shards do not make {num_ranks}, one for each rank.")
    x_SBH = x_sBH.new_empty(num_ranks * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[rank].copy_(x_sBH)

    def start(distances: range) -> list[Handle]:
        """Exchange with the ranks at these distances; the shard of rank - i comes from distance i."""
        peers = [((rank + i) % num_ranks, (rank - i) % num_ranks) for i in distances if i > 0]
        return [batch_send_recv(shards[rank], to, shards[source], source, group=group) for to, source in peers]

    groups = list(_groups(sizes))
    arriving = start(groups[0])
    for distances, following in zip(groups, [*groups[1:], range(0)], strict=True):
        for transfer in arriving:
            transfer.wait()
        arriving = start(following)
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


def _group_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    """At TP 2 a GEMM for each shard is a ring; at larger TP few GEMMs help."""
    if num_ranks == 2 or where not in ("gather", "gather for wgrad too"):
        return ()
    methods = [SHARDS_PER_GEMM.method()]
    return [*methods, SHARDS_PER_GEMM.method(1, num_ranks - 1)] if where == "gather" else methods


SHARDS_PER_GEMM = Kind(
    name="shards_per_gemm",
    cut="by shard",
    transport="p2p",
    summary="straight from rank to rank, several shards a GEMM, the own one first",
    gather=_gather_in_groups,
    pieces="shards of each GEMM; without numbers 1, 1, 2, 4, …",
    is_paceable=True,
    old_names=("grouped",),
    candidates=_group_candidates,
    overlaps=lambda method: len(method.pieces) != 1,
)


def _scatter_p2p(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    """Produce the rows of the next rank and start sending them, then those of the one after it, the own rows last."""
    assert group is not None, "sending needs a group"
    (num_chunks,) = method.pieces
    num_ranks, rank = group.size, group.rank
    shard_rows = shape[0] // num_ranks
    parts: dict[int, Handle] = {}
    for step in range(1, num_ranks):
        destination, source = (rank + step) % num_ranks, (rank - step) % num_ranks
        outgoing, incoming = (like.new_empty(shard_rows, *shape[1:]) for _ in range(2))
        transfers = []
        for start, stop in chunk_bounds(shard_rows, num_chunks):
            first = destination * shard_rows
            produce(slice(first + start, first + stop), outgoing[start:stop])
            transfers.append(
                batch_send_recv(outgoing[start:stop], destination, incoming[start:stop], source, group=group)
            )
        parts[source] = Handle(incoming, transfers)
    own_sBH = like.new_empty(shard_rows, *shape[1:])
    produce(slice(rank * shard_rows, (rank + 1) * shard_rows), own_sBH)
    parts[rank] = Handle(own_sBH)
    return SumHandle([parts[source] for source in range(num_ranks)])


def _p2p_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    if where == "scatter beside wgrad":
        return [P2P.method()]
    if where != "scatter":
        return ()
    chunks = [P2P.method(2), P2P.method(4)] if num_ranks == 2 else [P2P.method(2)]
    return [P2P.method(), *chunks, P2P.method(paced=True)]


P2P = Kind(
    name="p2p",
    cut="by shard",
    transport="p2p",
    summary="straight from rank to rank, the own rows last, one sum in rank order",
    scatter=_scatter_p2p,
    pieces="chunks of a shard",
    default_pieces=(1,),
    example_pieces=(2,),
    is_paceable=True,
    switches=("tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"),
    old_names=("exchange",),
    candidates=_p2p_candidates,
)


def _scatter_by_reducing(produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: Method) -> Handle:
    """Produce the rows of rank 0 and start their reduction to it, then those of rank 1, and so on.

    Each shard has a buffer of its own, so that only this rank's shard stays after the call.
    """
    num_ranks, rank = size_of(group), rank_in(group)
    shard_rows = shape[0] // num_ranks
    shards, reductions = [], []
    for destination in range(num_ranks):
        shard_sBH = like.new_empty(shard_rows, *shape[1:])
        produce(slice(destination * shard_rows, (destination + 1) * shard_rows), shard_sBH)
        reductions.append(reduce(shard_sBH, destination, group))
        shards.append(shard_sBH)
    return Handle(shards[rank], reductions, shards)


def _reduce_candidates(where: Where, num_ranks: int) -> Sequence[Method]:
    return [REDUCE.method()] if where == "scatter" else ()


REDUCE = Kind(
    name="reduce",
    cut="by shard",
    transport="collective",
    summary="a reduction to each rank, one after the other",
    scatter=_scatter_by_reducing,
    candidates=_reduce_candidates,
)

KINDS = (RING, SHARDS_PER_GEMM, P2P, REDUCE)
