"""Threads that wait for communication, so that its end has a time.

Gloo does not say when a communication was finished: whoever waits for it learns that it is, however late it asks. So a
thread waits from the beginning, and the code that needs the result waits for the thread. Each work of a point-to-point
communication may be waited for once only, which is the thread's.
"""

import threading
import time
from queue import SimpleQueue

from shiplap.dist.hooks import Work


class Finish:
    """The end of a communication."""

    def __init__(self, work: Work) -> None:
        """Not there yet."""
        self._work: Work | None = work
        self._is_known = threading.Event()
        self._error: BaseException | None = None
        self._ns = 0

    def await_it(self) -> None:
        """On the thread that watches: wait, and note the time."""
        assert self._work is not None
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._ns, self._work = time.perf_counter_ns(), None
        self._is_known.set()

    def wait(self) -> int:
        """On any thread: its time, in ns of `time.perf_counter_ns`.

        Raises:
            BaseException: what the communication failed with.
        """
        self._is_known.wait()
        if self._error is not None:
            raise self._error
        return self._ns


class Watchers:
    """As many threads as communications were under way at once."""

    def __init__(self) -> None:
        """None yet."""
        self._finishes: SimpleQueue[Finish | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def watch(self, work: Work) -> Finish:
        """Have a thread wait for the work, from now on."""
        finish = Finish(work)
        self._finishes.put(finish)
        if not self._idle.acquire(blocking=False):
            # A daemon: where a peer has failed it may wait for ever, and must not keep this process from ending.
            thread = threading.Thread(target=self._serve, name="shiplap-trace", daemon=True)
            thread.start()
            self._threads.append(thread)
        return finish

    def _serve(self) -> None:
        while (finish := self._finishes.get()) is not None:
            finish.await_it()
            self._idle.release()

    def close(self) -> None:
        """End the threads, all of whose communications are finished."""
        for _ in self._threads:
            self._finishes.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
