"""How much communication is exposed: the time in which nothing else could run, because a result was waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExposedTime:
    """Adds up the waits for communication while it is the measuring one.

    On the CPU a wait is the time that the host is blocked. On CUDA it is the time that the current stream stands still,
    between two events; that costs two event records a wait, and no synchronization.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing measured yet, of communication on this device."""
        self._is_cuda = device.type == "cuda"
        self._host_ms = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def wait(self) -> Iterator[None]:
        """One wait is inside."""
        if self._is_cuda:
            if not self._spare:
                self._spare.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            begin, end = self._spare.pop()
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._host_ms += 1e3 * (time.perf_counter() - started)

    def take_milliseconds(self) -> float:
        """All waits since this was last asked. On CUDA the device must have finished them."""
        total = self._host_ms + sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        self._host_ms, self._events, self._spare = 0.0, [], self._spare + self._events
        return total


_measuring: ExposedTime | None = None


@contextmanager
def measuring(exposed: ExposedTime) -> Iterator[None]:
    """Let `exposed` measure all waits inside, on whatever thread: backward on CUDA has its own."""
    global _measuring
    before, _measuring = _measuring, exposed
    try:
        yield
    finally:
        _measuring = before


@contextmanager
def one_wait() -> Iterator[None]:
    """A wait is inside; it counts if somebody measures, and waits inside it do not count again."""
    exposed = _measuring
    if exposed is None:
        yield
    else:
        with _nobody_measuring(), exposed.wait():
            yield


@contextmanager
def _nobody_measuring() -> Iterator[None]:
    global _measuring
    before, _measuring = _measuring, None
    try:
        yield
    finally:
        _measuring = before
