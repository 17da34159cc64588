"""Telling somebody what communicates and what is multiplied, for which layer and how; nothing, while nobody watches.

The code that runs says so itself: `told_of` marks what communicates, `at_site` the primitives of
`shiplap.overlap.primitives`, `running_product` a product. What an autograd Function does in backward belongs to the module
that was running in its forward: `remembering` and `resuming` take that along. It is for reports only; nothing that is
computed depends on it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar

from torch import Tensor

from shiplap.dist.pacing import Work

Primitive = Literal["gather", "scatter", "prefetch"]
ProductSite = Literal["forward", "dgrad", "wgrad"]


Watch = Callable[[Sequence[Work]], Sequence[Work]]


class _Pending(Protocol):
    def watched(self, watch: Watch) -> Self: ...


class Observer(Protocol):
    """Who watches. Everything is called on the thread that runs the model: in backward on CUDA that is another one."""

    def place(self) -> object:
        """What is running now, for `resumed`."""

    def resumed(self, place: object) -> AbstractContextManager[None]:
        """The backward of what ran at `place` is inside."""

    def primitive(self, primitive: Primitive, method: str) -> AbstractContextManager[None]:
        """A gather with what consumes it, a scatter with what produces it, or the start of a gather is inside."""

    def product(self, site: ProductSite) -> AbstractContextManager[None]:
        """A layer's product of some rows is inside."""

    def communication(self, collective: str, num_bytes: int) -> AbstractContextManager[Watch]:
        """The start of a communication is inside; the works that it started go through what this gives.

        Args:
            collective: such as `all-gather`.
            num_bytes: of what this rank puts in.
        """


_observer: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of everything that happens inside, on whatever thread."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def is_observed() -> bool:
    """Whether somebody watches."""
    return _observer is not None


def running_product(site: ProductSite) -> AbstractContextManager[None]:
    """A layer's product of some rows is inside."""
    return nullcontext() if _observer is None else _observer.product(site)


_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_PendingResult = TypeVar("_PendingResult", bound=_Pending)


def told_of(
    collective: str,
) -> Callable[[Callable[Concatenate[Tensor, _P], _PendingResult]], Callable[Concatenate[Tensor, _P], _PendingResult]]:
    """For functions that start a communication of their first argument."""

    def decorate(
        start: Callable[Concatenate[Tensor, _P], _PendingResult],
    ) -> Callable[Concatenate[Tensor, _P], _PendingResult]:
        @wraps(start)
        def told(x: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _PendingResult:
            if _observer is None:
                return start(x, *args, **kwargs)
            with _observer.communication(collective, x.numel() * x.element_size()) as watch:
                pending = start(x, *args, **kwargs)
            return pending.watched(watch)

        return told

    return decorate


def at_site(
    primitive: Primitive,
) -> Callable[[Callable[Concatenate[str, _P], _Result]], Callable[Concatenate[str, _P], _Result]]:
    """For the primitives, whose first argument is the method."""

    def decorate(function: Callable[Concatenate[str, _P], _Result]) -> Callable[Concatenate[str, _P], _Result]:
        @wraps(function)
        def told(method: str, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
            if _observer is None:
                return function(method, *args, **kwargs)
            with _observer.primitive(primitive, method):
                return function(method, *args, **kwargs)

        return told

    return decorate


def remembering(forward: Callable[Concatenate[Any, _P], _Result]) -> Callable[Concatenate[Any, _P], _Result]:
    """For the forward of an autograd Function whose backward is `resuming`."""

    @wraps(forward)
    def remembered(ctx: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        ctx.observed_place = None if _observer is None else _observer.place()
        return forward(ctx, *args, **kwargs)

    return remembered


def resuming(backward: Callable[Concatenate[Any, _P], _Result]) -> Callable[Concatenate[Any, _P], _Result]:
    """For the backward of an autograd Function whose forward is `remembering`."""

    @wraps(backward)
    def resumed(ctx: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if _observer is None or ctx.observed_place is None:
            return backward(ctx, *args, **kwargs)
        with _observer.resumed(ctx.observed_place):
            return backward(ctx, *args, **kwargs)

    return resumed
