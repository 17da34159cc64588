"""The observer of a traced run: notes what happens, for which layer, and when."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch.profiler import record_function

from shiplap.dist.hooks import GemmSite, Primitive, Watch, Work
from shiplap.tools.trace.spans import LANE_OF_PRIMITIVE, MODEL, LayerKind, Place, Span, SpanKind
from shiplap.tools.trace.watchers import Finish, Watchers


class Recorder:
    """Notes spans. One thread at a time runs the model, so one stack of places serves.

    On the CPU, communication ends when a thread that watches it says so. On CUDA the host knows no ends; there the
    spans' annotations in PyTorch's profiler lead to what ran on the device (`shiplap.tools.trace.device`).
    """

    def __init__(self, kinds: Mapping[str, LayerKind], *, watchers: Watchers | None) -> None:
        """Nothing recorded yet.

        Args:
            kinds: the parallel layers, by module path.
            watchers: of communication on the CPU; None on CUDA.
        """
        self._kinds = kinds
        self._watchers = watchers
        self._places = [Place()]
        self._spans: list[Span] = []
        self._finishes: dict[int, list[Finish]] = {}
        self._num_spans = 0

    def spans(self) -> list[Span]:
        """All that was recorded, once everything that was started is finished."""
        finished: dict[int | None, int] = {}
        for span in self._spans:
            if span.number in self._finishes:
                span.end_ns = finished[span.number] = max(finish.wait() for finish in self._finishes[span.number])
        for span in self._spans:
            if span.of in finished:
                # After the end, what waits has to wake up: that takes longer here than untraced, with a thread between.
                span.end_ns = max(span.begin_ns, min(span.end_ns, finished[span.of]))
        return self._spans

    # What `shiplap.dist.hooks` tells.

    def scope(self) -> Place:
        """What is running now."""
        return self._places[-1]

    @contextmanager
    def restored(self, scope: object) -> Iterator[None]:
        """The backward of what ran in `scope` is inside."""
        assert isinstance(scope, Place)
        with self.module(scope.layer, "backward"):
            yield

    @contextmanager
    def primitive(self, primitive: Primitive, method: str) -> Iterator[None]:
        """A primitive is inside."""
        with self._at(replace(self.scope(), primitive=primitive, method=method)):
            yield

    @contextmanager
    def gemm(self, site: GemmSite) -> Iterator[None]:
        """A layer's GEMM is inside."""
        place = self.scope()
        own_site = place.direction if site == "forward" else site
        span = self._new("product", layer=place.layer, site=own_site, method=place.method)
        span.lane = "GEMM"
        with self._timed(span):
            yield

    @contextmanager
    def collective(self, name: str, num_bytes: int) -> Iterator[Watch]:
        """The start of a communication is inside."""
        place = self.scope()
        span = self._new(
            "communication",
            layer=place.layer,
            site=place.communication_site(self._kinds.get(place.layer)),
            method=place.method or name,
        )
        span.lane, span.collective, span.num_bytes = LANE_OF_PRIMITIVE[place.primitive], name, num_bytes

        def watch(works: Sequence[Work]) -> Sequence[Work]:
            # Only here: without works, nobody else took part, and nothing was communicated.
            self._spans.append(span)
            if self._watchers is None:
                return [_Watched(self, span, works)]
            finishes = self._finishes[span.number] = [self._watchers.watch(work) for work in works]
            return [_Watched(self, span, finishes)]

        with self._timed(span, keep=False):
            yield watch

    # What the trace itself tells.

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step is inside."""
        span = self._new("step", layer=f"step {number}", site="", method="")
        with self._timed(span):
            yield

    @contextmanager
    def module(self, layer: str, direction: str) -> Iterator[None]:
        """A module's forward, or the backward of something in it, is inside."""
        with self._at(Place(layer=layer or MODEL, direction=direction)):
            with self._timed(self._new("module", layer=layer or MODEL, site=direction, method="")):
                yield

    @contextmanager
    def wait(self, communication: Span) -> Iterator[None]:
        """A wait for it is inside."""
        span = self._new("wait", layer=communication.layer, site=communication.site, method=communication.method)
        span.lane, span.of = "waiting", communication.number
        span.collective = communication.collective
        with self._timed(span):
            yield

    @contextmanager
    def _at(self, place: Place) -> Iterator[None]:
        depth = len(self._places)
        self._places.append(place)
        try:
            yield
        finally:
            del self._places[depth:]

    def _new(self, kind: SpanKind, *, layer: str, site: str, method: str) -> Span:
        self._num_spans += 1
        return Span(number=self._num_spans - 1, kind=kind, layer=layer, site=site, method=method, lane="layers")

    @contextmanager
    def _timed(self, span: Span, *, keep: bool = True) -> Iterator[None]:
        if keep:
            self._spans.append(span)
        span.begin_ns = time.perf_counter_ns()
        with record_function(span.annotation):
            try:
                yield
            finally:
                span.end_ns = time.perf_counter_ns()


class _Watched:
    """A communication the wait for which is recorded."""

    def __init__(self, recorder: Recorder, span: Span, works: Sequence[Work]) -> None:
        self._recorder = recorder
        self._span = span
        self._works = works

    def wait(self) -> None:
        """Until it is finished; on CUDA, let the current stream do so."""
        with self._recorder.wait(self._span):
            for work in self._works:
                work.wait()
