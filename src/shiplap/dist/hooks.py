"""Two calls by which the code that runs is watched: a *wait* for communication, and a *span* with something in it.

Training measures waits (`measuring`): that is its exposed communication. A trace watches spans (`observing`): which
communication, which primitive and which GEMM runs, and for which layer. Nothing that is computed depends on either, and
while nobody watches each costs one comparison.

In backward an autograd Function belongs to the module that ran its forward: it saves that with `save_scope`, and
restores it with `restore_scope`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor

Primitive = Literal["gather", "scatter", "prefetch"]
GemmSite = Literal["forward", "dgrad", "wgrad"]


class Work(Protocol):
    """A communication that was started, as torch.distributed has it."""

    def wait(self) -> object:
        """Until it is finished; on CUDA, let the current stream do so."""


Watch = Callable[[Sequence[Work]], Sequence[Work]]


class Observer(Protocol):
    """A watcher of spans. Everything is called on the thread that runs the model: on CUDA backward has another one."""

    def scope(self) -> object:
        """The module that is running now, for `restored`."""

    def restored(self, scope: object) -> AbstractContextManager[None]:
        """The backward of what ran in `scope` is inside."""

    def primitive(self, primitive: Primitive, method: str) -> AbstractContextManager[None]:
        """A gather with what consumes it, a scatter with what produces it, or the start of a gather is inside."""

    def gemm(self, site: GemmSite) -> AbstractContextManager[None]:
        """A layer's GEMM of some rows is inside."""

    def collective(self, name: str, num_bytes: int) -> AbstractContextManager[Watch]:
        """The start of a communication is inside; the works that it starts go through what this gives.

        Args:
            name: such as `all-gather`.
            num_bytes: of what this rank puts in.
        """


_observer: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every span inside, on whatever thread."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def record_primitive(primitive: Primitive, method: object) -> AbstractContextManager[None]:
    """A primitive is inside, done by a method whose text is its name."""
    return nullcontext() if _observer is None else _observer.primitive(primitive, str(method))


def record_gemm(site: GemmSite) -> AbstractContextManager[None]:
    """A layer's GEMM of some rows is inside."""
    return nullcontext() if _observer is None else _observer.gemm(site)


def record_collective(name: str, x: Tensor) -> AbstractContextManager[Watch]:
    """The start of a communication of `x` is inside; its works must go through what this gives."""
    return nullcontext(_unwatched) if _observer is None else _observer.collective(name, x.numel() * x.element_size())


def save_scope() -> object:
    """In forward: what `restore_scope` needs in backward."""
    return None if _observer is None else _observer.scope()


def restore_scope(scope: object) -> AbstractContextManager[None]:
    """The backward of what saved this scope is inside."""
    return nullcontext() if _observer is None or scope is None else _observer.restored(scope)


def _unwatched(works: Sequence[Work]) -> Sequence[Work]:
    return works


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
        """All waits since the last call. On CUDA the device must have finished them."""
        total = self._host_ms + sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        self._host_ms, self._events, self._spare = 0.0, [], self._spare + self._events
        return total


_measuring: ExposedTime | None = None


@contextmanager
def measuring(exposed: ExposedTime | None) -> Iterator[None]:
    """Let `exposed` measure all waits inside, on whatever thread: backward on CUDA has its own. None: nobody does."""
    global _measuring
    before, _measuring = _measuring, exposed
    try:
        yield
    finally:
        _measuring = before


@contextmanager
def record_wait() -> Iterator[None]:
    """A wait for communication is inside. It counts once: waits inside it do not count again."""
    exposed = _measuring
    if exposed is None:
        yield
    else:
        with measuring(None), exposed.wait():
            yield
