"""Waits for communication add up once, and only while somebody measures."""

import torch

from shiplap.dist.collectives import Handle, SumHandle
from shiplap.dist.hooks import ExposedTime, measuring, record_wait


class Work:
    """A communication that notes how many waits measure it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class Counting(ExposedTime):
    """Counts waits instead of their time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_waits = 0

    def wait(self):  # type: ignore[no-untyped-def]
        self.num_waits += 1
        return super().wait()


def pending(*works: Work | Handle) -> Handle:
    return Handle(torch.ones(2), works)


def test_each_wait_counts_once_however_nested() -> None:
    exposed, works = Counting(), [Work() for _ in range(4)]
    with measuring(exposed):
        pending(works[0], works[1]).wait()
        pending(pending(works[2]), pending(works[3])).wait()
    assert exposed.num_waits == 2
    assert [work.num_waits for work in works] == [1] * 4
    assert exposed.take_milliseconds() > 0
    assert exposed.take_milliseconds() == 0.0


def test_a_sum_waits_for_each_part() -> None:
    exposed = Counting()
    with measuring(exposed):
        total = SumHandle([pending(Work()), pending(), pending(Work())]).wait()
    assert exposed.num_waits == 2
    assert total.tolist() == [3.0, 3.0]


def test_nothing_counts_unless_somebody_measures() -> None:
    exposed = Counting()
    pending(Work()).wait()
    with measuring(exposed):
        pending().wait()
    with record_wait():
        pass
    assert exposed.num_waits == 0
    assert exposed.take_milliseconds() == 0.0
