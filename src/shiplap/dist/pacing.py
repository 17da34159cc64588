"""Transfers between ranks one after the other: in each turn everybody sends to one rank and receives from one.

Where all ranks send to all others at once, several transfers meet at every receiver and get in each other's way: on
four hosts they took up to 1.4 times as long as in turns (docs/experiments.md). NCCL runs what it is given in that order
anyway. Gloo starts everything at once, so a thread starts each turn when the one before it is over. It costs some
tenths of a millisecond a turn, which short messages do not win back, and runs only while there is something to do.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol


class Work(Protocol):
    """A communication that was started, as torch.distributed has it."""

    def wait(self) -> object:
        """Until it is finished; on CUDA, let the current stream do so."""


class Turn:
    """Some transfers that are started together, sooner or later."""

    def __init__(self, start: Callable[[], Sequence[Work]]) -> None:
        """What starts them."""
        self._start: Callable[[], Sequence[Work]] | None = start
        self._is_over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Start them and wait until they are finished, or have failed; nobody is told yet."""
        assert self._start is not None
        try:
            for work in self._start():
                work.wait()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """They are finished, or will never be; let go of the tensors."""
        self._start = None
        self._is_over.set()

    def wait(self) -> None:
        """Until they are finished.

        Raises:
            BaseException: what they failed with, or those of an earlier turn.
        """
        self._is_over.wait()
        if self.error is not None:
            raise self.error


class Turns:
    """A queue of transfers. All ranks must take the same turns in the same order."""

    def __init__(self) -> None:
        """Nothing to do."""
        self._lock = threading.Lock()
        self._open: deque[Turn] = deque()
        self._is_served = False
        self._thread: threading.Thread | None = None

    def take(self, start: Callable[[], Sequence[Work]]) -> Turn:
        """Start transfers when those before them are finished, at once if there are none."""
        turn = Turn(start)
        with self._lock:
            self._open.append(turn)
            if not self._is_served:
                self._is_served = True
                # A daemon: where a peer has failed it may wait for ever, and must not keep this process from ending.
                self._thread = threading.Thread(target=self._serve, name="shiplap-turns", daemon=True)
                self._thread.start()
        return turn

    def close(self) -> None:
        """Wait for the thread, unless a transfer is not finished."""
        with self._lock:
            thread = None if self._open else self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._is_served = False
                    return
                turn = self._open[0]
            turn.run()
            with self._lock:
                over = [self._open.popleft()]
                if turn.error is not None:
                    # The ranks are no longer in step.
                    over += self._open
                    self._open.clear()
            # Only now: who has waited for the last one may close.
            for one in over:
                one.error = turn.error
                one.end()
