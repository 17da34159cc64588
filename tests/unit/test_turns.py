"""Turns: the order in which transfers are started, what one that fails means for the others, and the thread."""

import threading
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest

from shiplap.dist.pacing import Turn, Turns, Work


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
    return [thread for thread in threading.enumerate() if thread.name == "shiplap-turns"]


def test_each_is_started_when_the_one_before_is_finished() -> None:
    turns, transfers = Turns(), [Transfer() for _ in range(3)]
    taken = [turns.take(transfer.start) for transfer in transfers]
    for number, (transfer, turn) in enumerate(zip(transfers, taken, strict=True)):
        transfer.is_started.wait()
        assert [one.is_started.is_set() for one in transfers] == [i <= number for i in range(3)]
        transfer.is_finished.set()
        turn.wait()
        turn.wait()
    turns.close()
    assert not threads()


def test_more_can_follow_when_all_is_done() -> None:
    turns = Turns()
    for _ in range(50):
        transfer = Transfer()
        transfer.is_finished.set()
        turns.take(transfer.start).wait()
        assert transfer.is_started.is_set()
        assert len(threads()) <= 2, "one that ends, and one that begins"
    turns.close()
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
    turns, before, behind = Turns(), Transfer(), Transfer()
    start, message = failing()
    first, second, third = turns.take(before.start), turns.take(start), turns.take(behind.start)
    before.is_finished.set()
    first.wait()
    for turn in (second, third):
        with pytest.raises(OSError, match=message):
            turn.wait()
    assert not behind.is_started.is_set()
    later = Transfer()
    later.is_finished.set()
    turns.take(later.start).wait()
    turns.close()


def test_who_has_waited_for_the_last_can_close() -> None:
    turns, transfer = Turns(), Transfer()
    transfer.is_finished.set()
    open_at_end: list[int] = []

    def end(turn: Turn) -> None:
        open_at_end.append(len(turns._open))
        end_of(turn)

    end_of = Turn.end
    with patch.object(Turn, "end", end):
        turns.take(transfer.start).wait()
    assert open_at_end == [0], "closing would not wait for the thread"


def test_closing_does_not_wait_for_a_rank_that_never_comes() -> None:
    turns, transfer = Turns(), Transfer()
    turn = turns.take(transfer.start)
    transfer.is_started.wait()
    turns.close()
    transfer.is_finished.set()
    turn.wait()
    turns.close()
    assert not threads()
