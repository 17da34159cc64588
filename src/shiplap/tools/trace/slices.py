"""What a rank's lanes show: slices of time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from shiplap.tools.trace.spans import Lane, Span


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a lane.

    Attributes:
        lane: where it is shown.
        name: what it shows.
        begin_ns: by the clock of `time.perf_counter_ns`, as is the end.
        end_ns: see `begin_ns`.
        step: number of the step that it belongs to, counted from 1.
        layer: see `Span`, as are the others.
        site: see `Span`.
        method: see `Span`.
        collective: of communication, and of waiting for it.
        num_bytes: that this rank puts into the communication.
        kernel: on a CUDA device, what ran.
    """

    lane: Lane
    name: str
    begin_ns: int
    end_ns: int
    step: int = 0
    layer: str = ""
    site: str = ""
    method: str = ""
    collective: str = ""
    num_bytes: int = 0
    kernel: str = ""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank recorded of the traced steps.

    Attributes:
        slices: of all lanes, those of a step with its number.
        step_ms: how long the host took for each step, by its number.
    """

    slices: Sequence[Slice]
    step_ms: dict[int, float]

    def to_text(self) -> str:
        """For another rank."""
        return json.dumps({"slices": [asdict(item) for item in self.slices], "step_ms": self.step_ms})

    @classmethod
    def from_text(cls, text: str) -> "RankTrace":
        """What a rank said."""
        read = json.loads(text)
        step_ms = {int(step): milliseconds for step, milliseconds in read["step_ms"].items()}
        return cls(slices=[Slice(**item) for item in read["slices"]], step_ms=step_ms)

    def moved(self, offset_ns: int) -> "RankTrace":
        """The same by a clock that shows so much less."""
        slices = [
            replace(item, begin_ns=item.begin_ns - offset_ns, end_ns=item.end_ns - offset_ns) for item in self.slices
        ]
        return replace(self, slices=slices)


def slice_of(span: Span, *, begin_ns: int, end_ns: int, kernel: str = "") -> Slice:
    """A slice that shows a span, or what it made run."""
    return Slice(
        lane=span.lane,
        name=span.name,
        begin_ns=begin_ns,
        end_ns=end_ns,
        layer=span.layer,
        site=span.site,
        method=span.method,
        collective=span.collective,
        num_bytes=span.num_bytes,
        kernel=kernel,
    )


def host_slices(spans: Iterable[Span]) -> list[Slice]:
    """Every span as it was on the host, but for waits for what was finished already."""
    return [
        slice_of(span, begin_ns=span.begin_ns, end_ns=span.end_ns)
        for span in spans
        if span.kind != "wait" or span.end_ns > span.begin_ns
    ]


def rank_trace(slices: Sequence[Slice], steps: Sequence[Span], first_step: int) -> RankTrace:
    """Slices with the numbers of their steps, and the backward of modules that consist of others.

    Args:
        slices: in any order; what began outside of these steps is left out.
        steps: the traced ones, one after the other.
        first_step: number of the first of them.
    """
    inside = []
    for number, step in enumerate(steps, start=first_step):
        own = [replace(item, step=number) for item in slices if step.begin_ns <= item.begin_ns < step.end_ns]
        inside += own + _backward_of_containers(own)
    step_ms = {number: (step.end_ns - step.begin_ns) / 1e6 for number, step in enumerate(steps, start=first_step)}
    return RankTrace(slices=sorted(inside, key=lambda item: (item.begin_ns, -item.end_ns)), step_ms=step_ms)


def _backward_of_containers(slices: Iterable[Slice]) -> list[Slice]:
    """From the first to the last backward within a block, or its attention or feed-forward.

    Autograd knows functions, not modules, so only the parts that communicate have a backward of their own.
    """
    backward = sorted(
        (item for item in slices if item.lane == "layers" and item.site == "backward"), key=lambda item: item.begin_ns
    )
    found = []
    for depth in (2, 3):
        for container, run in groupby(backward, key=lambda item: _container(item.layer, depth)):
            parts = list(run)
            if container is not None:
                end_ns = max(part.end_ns for part in parts)
                found.append(replace(parts[0], name=f"{container} backward", layer=container, end_ns=end_ns))
    return found


def _container(layer: str, depth: int) -> str | None:
    """`blocks.0` or `blocks.0.mlp` for `blocks.0.mlp.fc1`; None where that is no module that consists of others."""
    parts = layer.split(".")
    return ".".join(parts[:depth]) if parts[0] == "blocks" and len(parts) > depth else None


def union_ns(slices: Iterable[Slice]) -> int:
    """How long at least one of the slices lasted."""
    total, reached = 0, 0
    for item in sorted(slices, key=lambda item: item.begin_ns):
        total += max(0, item.end_ns - max(item.begin_ns, reached))
        reached = max(reached, item.end_ns)
    return total
