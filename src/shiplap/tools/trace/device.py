"""What ran on a CUDA device, from the file that PyTorch's profiler writes: which lane, which layer, and what waited.

The profiler knows kernels, each with the call that launched it, and spans are annotations. So a kernel belongs to the
spans that its launch is in; on whatever thread, since one at a time runs the model. Times on the device and on the host
come from one clock, which is the profiler's; the spans' own times tell how far it is from `time.perf_counter_ns`.

A wait is known by its host's time only: the stream is told to wait there, and stands still from then on or from the end
of what it does until then, until the communication is finished or, at the latest, until its next kernel begins.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from shiplap.tools.trace.slices import Slice, slice_of
from shiplap.tools.trace.spans import ANNOTATION, Span

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, kw_only=True)
class _Annotation:
    """A span as the profiler saw it; times by its clock.

    Attributes:
        span: that it stands for.
        begin_ns: on the host.
        end_ns: on the host.
        parent: the annotation around it.
    """

    span: Span
    begin_ns: int
    end_ns: int
    parent: "_Annotation | None"

    def chain(self) -> Iterable["_Annotation"]:
        """This one and all around it, from the inside out."""
        at: _Annotation | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """Something that ran on the device.

    Attributes:
        name: the kernel's.
        stream: of the device.
        begin_ns: on the device.
        end_ns: on the device.
        launched_ns: on the host.
        within: the spans of its launch, from the inside out.
    """

    name: str
    stream: int
    begin_ns: int
    end_ns: int
    launched_ns: int
    within: Sequence[Span]

    def first(self, kind: str) -> Span | None:
        """The innermost span of this kind."""
        return next((span for span in self.within if span.kind == kind), None)

    @property
    def is_nccl(self) -> bool:
        return self.name.lower().startswith("nccl")


def device_slices(profile: Mapping[str, Any], spans: Sequence[Span]) -> list[Slice]:
    """Slices of all lanes, with times by the clock of `time.perf_counter_ns`.

    Args:
        profile: what `torch.profiler.profile.export_chrome_trace` wrote, read as JSON.
        spans: recorded while it was profiled.
    """
    events: Sequence[Mapping[str, Any]] = profile["traceEvents"]
    annotations = _annotations(events, {span.number: span for span in spans})
    if not annotations:
        return []
    ran = _ran_on_device(events, annotations)
    compute = _compute_stream(ran)
    slices = [_shown(item, compute) for item in ran]
    slices += _modules([item for item in ran if item.stream == compute])
    slices += _waits(annotations, ran, compute)
    offset = round(median(a.begin_ns - a.span.begin_ns for a in annotations))
    steps = [a.span for a in annotations if a.span.kind == "step"]
    return [slice_of(span, begin_ns=span.begin_ns, end_ns=span.end_ns) for span in steps] + [
        replace(item, begin_ns=item.begin_ns - offset, end_ns=item.end_ns - offset) for item in slices
    ]


def _ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def _around(annotations: Sequence[_Annotation], at_ns: int) -> _Annotation | None:
    """The innermost one that was open at that time."""
    last = bisect_right(annotations, at_ns, key=lambda a: a.begin_ns) - 1
    return _open_at(annotations[last] if last >= 0 else None, at_ns)


def _open_at(annotation: _Annotation | None, at_ns: int) -> _Annotation | None:
    while annotation is not None and annotation.end_ns <= at_ns:
        annotation = annotation.parent
    return annotation


def _annotations(events: Iterable[Mapping[str, Any]], spans: Mapping[int, Span]) -> list[_Annotation]:
    """In the order in which they began."""
    found: list[_Annotation] = []
    ours = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(ANNOTATION)]
    for event in sorted(ours, key=lambda e: (e["ts"], -e["dur"])):
        number = re.match(rf"{ANNOTATION}(\d+) ", event["name"])
        span = spans.get(int(number[1])) if number else None
        if span is None:
            continue
        begin_ns = _ns(event["ts"])
        parent = _open_at(found[-1] if found else None, begin_ns)
        annotation = _Annotation(span=span, begin_ns=begin_ns, end_ns=begin_ns + _ns(event["dur"]), parent=parent)
        found.append(annotation)
    return found


def _ran_on_device(events: Iterable[Mapping[str, Any]], annotations: Sequence[_Annotation]) -> list[_Ran]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in _ON_DEVICE or launch is None:
            continue
        begin_ns, launched_ns = _ns(event["ts"]), _ns(launch["ts"])
        around = _around(annotations, launched_ns)
        found.append(
            _Ran(
                name=event["name"],
                stream=event["args"].get("stream", event.get("tid")),
                begin_ns=begin_ns,
                end_ns=begin_ns + _ns(event["dur"]),
                launched_ns=launched_ns,
                within=[] if around is None else [a.span for a in around.chain()],
            )
        )
    return sorted(found, key=lambda item: item.begin_ns)


def _compute_stream(ran: Iterable[_Ran]) -> int | None:
    """The stream of the layers' products."""
    counted = Counter(item.stream for item in ran if item.first("product") is not None)
    return counted.most_common(1)[0][0] if counted else None


def _communication(item: _Ran, compute: int | None) -> Span | None:
    """The communication that it does; copies that prepare one run on the stream of the products."""
    return item.first("communication") if item.is_nccl or item.stream != compute else None


def _shown(item: _Ran, compute: int | None) -> Slice:
    communication, product = _communication(item, compute), item.first("product")
    if communication is not None:
        return slice_of(communication, begin_ns=item.begin_ns, end_ns=item.end_ns, kernel=item.name)
    if item.is_nccl:
        return Slice(
            lane="other comm",
            name="step data parallel",
            begin_ns=item.begin_ns,
            end_ns=item.end_ns,
            layer="step",
            method="data parallel",
            kernel=item.name,
        )
    if product is not None and item.stream == compute:
        return slice_of(product, begin_ns=item.begin_ns, end_ns=item.end_ns, kernel=item.name)
    return Slice(
        lane="other kernels", name=_short(item.name), begin_ns=item.begin_ns, end_ns=item.end_ns, kernel=item.name
    )


def _short(kernel: str) -> str:
    """`vectorized_elementwise_kernel` for `void at::native::vectorized_elementwise_kernel<4, …>(…)`."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].rpartition("::")[2].strip() or kernel


def _modules(on_compute: Iterable[_Ran]) -> list[Slice]:
    """Modules from the first to the last of what they ran."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    spans: dict[int, Span] = {}
    for item in on_compute:
        for span in item.within:
            if span.kind == "module":
                spans[span.number] = span
                begin[span.number] = min(begin.get(span.number, item.begin_ns), item.begin_ns)
                end[span.number] = max(end.get(span.number, 0), item.end_ns)
    return [slice_of(span, begin_ns=begin[number], end_ns=end[number]) for number, span in spans.items()]


def _waits(annotations: Iterable[_Annotation], ran: Iterable[_Ran], compute: int | None) -> list[Slice]:
    finished: dict[int, int] = {}
    on_compute = []
    for item in ran:
        communication = _communication(item, compute)
        if communication is not None:
            finished[communication.number] = max(finished.get(communication.number, 0), item.end_ns)
        elif item.stream == compute:
            on_compute.append(item)
    on_compute.sort(key=lambda item: item.launched_ns)
    slices: list[Slice] = []
    reached = 0
    for wait in sorted((a for a in annotations if a.span.kind == "wait"), key=lambda a: a.begin_ns):
        assert wait.span.of is not None
        following = bisect_right(on_compute, wait.begin_ns, key=lambda item: item.launched_ns)
        before_ns = on_compute[following - 1].end_ns if following else 0
        begin_ns = max(wait.begin_ns, before_ns, reached)
        end_ns = finished.get(wait.span.of, 0)
        if following < len(on_compute):
            end_ns = min(end_ns, on_compute[following].begin_ns)
        if end_ns > begin_ns:
            slices.append(slice_of(wait.span, begin_ns=begin_ns, end_ns=end_ns))
            reached = end_ns
    return slices
