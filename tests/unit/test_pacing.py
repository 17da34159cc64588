"""Pacing: the order in which transfers are started, what one that fails means for the others, and the thread."""

import threading
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest

from shiplap.dist.hooks import Work
from shiplap.dist.pacing import PacedWork, Pacer


class Transfer:
    """A transfer that is finished when the test says so."""

    def __init__(self) -> None:
        self.is_started = threading.Event()
        self.is_finished = threading.Event()
        self.error: Exception | None = None

    def start(self) -> Sequence[Work]:
        self.is_started.set()
        return [self]

    def wait(self) -> None:
        self.is_finished.wait()
        if self.error is not None:
            raise self.error


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shiplap-pacer"]


def test_each_is_started_when_the_one_before_is_finished() -> None:
    pacer, transfers = Pacer(), [Transfer() for _ in range(3)]
    works = [pacer.add(transfer.start) for transfer in transfers]
    for number, (transfer, work) in enumerate(zip(transfers, works, strict=True)):
        transfer.is_started.wait()
        assert [one.is_started.is_set() for one in transfers] == [i <= number for i in range(3)]
        transfer.is_finished.set()
        work.wait()
        work.wait()
    pacer.close()
    assert not threads()


def test_more_can_follow_when_all_is_done() -> None:
    pacer = Pacer()
    for _ in range(50):
        transfer = Transfer()
        transfer.is_finished.set()
        pacer.add(transfer.start).wait()
        assert transfer.is_started.is_set()
        assert len(threads()) <= 2, "one that ends, and one that begins"
    pacer.close()
    assert not threads()


def fails_at_start() -> tuple[Callable[[], Sequence[Work]], str]:
    def start() -> Sequence[Work]:
        raise OSError("no such rank")

    return start, "no such rank"


def fails_on_its_way() -> tuple[Callable[[], Sequence[Work]], str]:
    transfer = Transfer()
    transfer.error = OSError("connection closed")
    transfer.is_finished.set()
    return transfer.start, "connection closed"


@pytest.mark.parametrize("failing", [fails_at_start, fails_on_its_way])
def test_a_failure_is_that_of_all_that_wait_behind_it(
    failing: Callable[[], tuple[Callable[[], Sequence[Work]], str]],
) -> None:
    pacer, before, behind = Pacer(), Transfer(), Transfer()
    start, message = failing()
    first, second, third = pacer.add(before.start), pacer.add(start), pacer.add(behind.start)
    before.is_finished.set()
    first.wait()
    for work in (second, third):
        with pytest.raises(OSError, match=message):
            work.wait()
    assert not behind.is_started.is_set()
    later = Transfer()
    later.is_finished.set()
    pacer.add(later.start).wait()
    pacer.close()


def test_who_has_waited_for_the_last_can_close() -> None:
    pacer, transfer = Pacer(), Transfer()
    transfer.is_finished.set()
    open_at_end: list[int] = []

    def end(work: PacedWork) -> None:
        open_at_end.append(len(pacer._open))
        end_of(work)

    end_of = PacedWork.end
    with patch.object(PacedWork, "end", end):
        pacer.add(transfer.start).wait()
    assert open_at_end == [0], "closing would not wait for the thread"


def test_closing_does_not_wait_for_a_rank_that_never_comes() -> None:
    pacer, transfer = Pacer(), Transfer()
    work = pacer.add(transfer.start)
    transfer.is_started.wait()
    pacer.close()
    transfer.is_finished.set()
    work.wait()
    pacer.close()
    assert not threads()
