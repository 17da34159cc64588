"""Transfers between ranks, paced: at any time every rank sends to one rank and receives from one.

Where all ranks send to all others at once, several transfers meet at every receiver and get in each other's way: on
four hosts they took up to 1.4 times as long as paced ones (docs/experiments.md). NCCL runs what it is given in that
order anyway. Gloo starts everything at once, so a thread starts each transfer when the one before it is over. That
costs some tenths of a millisecond a transfer, more than pacing gains on short messages, and the thread runs only while
there is something to do.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from shiplap.dist.hooks import Work


class PacedWork:
    """Some transfers that are started together, sooner or later."""

    def __init__(self, start: Callable[[], Sequence[Work]]) -> None:
        """Not started yet."""
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
        """They are finished, or never will be; let go of the tensors."""
        self._start = None
        self._is_over.set()

    def wait(self) -> None:
        """Until they are finished.

        Raises:
            BaseException: the error that they, or earlier ones, failed with.
        """
        self._is_over.wait()
        if self.error is not None:
            raise self.error


class Pacer:
    """A queue of transfers. All ranks must add the same ones in the same order."""

    def __init__(self) -> None:
        """Nothing to do."""
        self._lock = threading.Lock()
        self._open: deque[PacedWork] = deque()
        self._is_served = False
        self._thread: threading.Thread | None = None

    def add(self, start: Callable[[], Sequence[Work]]) -> PacedWork:
        """Start transfers when those before them are finished, at once if there are none."""
        work = PacedWork(start)
        with self._lock:
            self._open.append(work)
            if not self._is_served:
                self._is_served = True
                # A daemon: where a peer has failed it may wait for ever, and must not keep this process from ending.
                self._thread = threading.Thread(target=self._serve, name="shiplap-pacer", daemon=True)
                self._thread.start()
        return work

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
                work = self._open[0]
            work.run()
            with self._lock:
                over = [self._open.popleft()]
                if work.error is not None:
                    # The ranks are no longer in step.
                    over += self._open
                    self._open.clear()
            # Only now: whoever has waited for the last one may close.
            for one in over:
                one.error = work.error
                one.end()
