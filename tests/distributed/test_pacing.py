"""Paced transfers, on ranks: one at a time, nothing mixed up, and no thread left behind."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, destroy_all_env, init_all_env
from shiplap.dist.collectives import Handle, RankGroup, send_to_each
from shiplap.overlap.plan import ColumnPlan, RowPlan
from tests.distributed.ranks import RankPool

NUM_RANKS, NUM_PIECES = 4, 5


class InFlight:
    """Counts how many exchanges this rank has under way."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._random = Random(torch.distributed.get_rank())
        self._start = torch.distributed.batch_isend_irecv

    def start(self, operations: list[Any]) -> list["Counted"]:
        time.sleep(self._random.random() * 2e-3)
        self._now += 1
        self.most = max(self.most, self._now)
        return [Counted(self, self._start(operations))]

    @contextmanager
    def finished(self) -> Any:
        yield
        self._now -= 1


class Counted:
    """The works of an exchange."""

    def __init__(self, counter: InFlight, works: Sequence[Any]) -> None:
        self._counter, self._works = counter, works

    def wait(self) -> None:
        with self._counter.finished():
            for work in self._works:
                work.wait()


def message(source: int, to: int, piece: int) -> torch.Tensor:
    """One that no other message is like; some are long."""
    return torch.full((3 + 5000 * (piece % 2),), 100.0 * source + 10 * to + piece)


def pieces(group: RankGroup) -> list[dict[int, Handle]]:
    return [
        send_to_each([message(group.rank, to, piece) for to in range(group.size)], group=group)
        for piece in range(NUM_PIECES)
    ]


def wrong(arriving: list[dict[int, Handle]], rank: int) -> list[str]:
    return [
        f"piece {number} from rank {source} at rank {rank}"
        for number, parts in enumerate(arriving)
        for source, part in parts.items()
        if not torch.equal(part.wait(), message(source, rank, number))
    ]


def paced_transfers() -> tuple[int, list[str], list[str]]:
    env = init_all_env(tensor_parallel_size=NUM_RANKS, device="cpu")
    group = env.group("tp")
    assert group is not None
    counter = InFlight()
    with patch.object(torch.distributed, "batch_isend_irecv", counter.start):
        mistakes = wrong(pieces(group.paced), group.rank)
    # Those that start at once pass them by, on some ranks before they have begun.
    paced = pieces(group.paced)
    mistakes += wrong(pieces(group), group.rank) + wrong(paced, group.rank)
    destroy_all_env()
    return counter.most, mistakes, [thread.name for thread in threading.enumerate() if "pacer" in thread.name]


def test_one_exchange_at_a_time_and_each_piece_where_it_belongs(ranks: Callable[[int], RankPool]) -> None:
    for most, mistakes, threads in ranks(NUM_RANKS).run(paced_transfers):
        assert most == 1
        assert not mistakes
        assert not threads


PLANS: list[ColumnPlan | RowPlan] = [
    ColumnPlan(forward="feature_chunks", dgrad="feature_chunks", wgrad="bulk_p2p"),
    ColumnPlan(forward="ring:2", dgrad="p2p:2", wgrad="ring"),
    ColumnPlan(forward="shards_per_gemm", dgrad="bulk_p2p", wgrad="feature_chunks"),
    RowPlan(forward="p2p", dgrad="shards_per_gemm"),
    RowPlan(forward="feature_chunks own_first", dgrad="feature_chunks own_first", wgrad="parts"),
]


def results(plan: ColumnPlan | RowPlan) -> list[torch.Tensor]:
    """y, dx and dW of a layer, from inputs that are the same at every call."""
    torch.manual_seed(torch.distributed.get_rank())
    is_column = isinstance(plan, ColumnPlan)
    layer = (ColumnParallelLinear if is_column else RowParallelLinear)(64, 96, False)
    torch.nn.init.normal_(layer.weight.detach())
    layer.plan = plan
    x = torch.randn(3 if is_column else 3 * NUM_RANKS, 2, layer.weight.shape[1], requires_grad=True)
    y = layer(x)
    dx, dw = torch.autograd.grad(y, [x, layer.weight], torch.randn_like(y))
    return [y.detach(), dx, dw]


def off_by_pacing() -> list[str]:
    """Of which plan a bit is another one when it is paced."""
    init_all_env(ModelParallelConfig(tensor_parallel_size=NUM_RANKS, sequence_parallel=True), device="cpu")
    off = []
    for plan in PLANS:
        sites = ("forward", "dgrad", "wgrad") if isinstance(plan, ColumnPlan) else ("forward", "dgrad")
        paced = replace(plan, **{site: replace(getattr(plan, site), paced=True) for site in sites})
        if not all(map(torch.equal, results(plan), results(paced))):
            off.append(str(plan))
    destroy_all_env()
    return off


def test_pacing_changes_no_bit(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(NUM_RANKS).run(off_by_pacing) == [[]] * NUM_RANKS
