"""What ran on a CUDA device, read from a profile made by hand: lanes, layers, and what the stream waited for."""

from collections.abc import Mapping
from typing import Any

from shiplap.tools.trace.device import device_slices
from shiplap.tools.trace.slices import Slice
from shiplap.tools.trace.spans import Lane, Span, SpanKind

COMPUTE, NCCL, CLOCK_OFFSET_NS = 7, 20, 5_000_000


class Profile:
    """A profile that is written down step by step; times in µs of the profiler's clock."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.events: list[Mapping[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
        self._num_launches = 0

    def span(self, kind: SpanKind, begin: int, end: int, **named: Any) -> Span:
        """A span that the host was in, with its annotation."""
        span = Span(number=len(self.spans), kind=kind, **{"layer": "fc1", "site": "forward", "lane": "layers"} | named)
        span.begin_ns, span.end_ns = 1000 * begin - CLOCK_OFFSET_NS, 1000 * end - CLOCK_OFFSET_NS
        self.spans.append(span)
        self._add("user_annotation", span.annotation, begin, end, tid=1)
        return span

    def kernel(self, name: str, launched: int, begin: int, end: int, *, stream: int = COMPUTE) -> None:
        """Something that ran, and the call that launched it."""
        self._num_launches += 1
        number = self._num_launches
        call, category = ("cuLaunchKernelEx", "cuda_driver") if number % 2 else ("cudaLaunchKernel", "cuda_runtime")
        self._add(category, call, launched, launched + 2, tid=2, correlation=number)
        self._add("kernel", name, begin, end, tid=stream, correlation=number, stream=stream, device=0)

    def slices(self) -> list[Slice]:
        """What is made of it, in the order of time and with times in µs of the profiler's clock."""
        # The profiler also projects annotations onto the device; those are not read.
        self._add("gpu_user_annotation", self.spans[0].annotation, 0, 999, tid=COMPUTE)
        found = device_slices({"traceEvents": self.events[::-1]}, self.spans)
        return sorted(found, key=lambda item: (item.begin_ns, item.lane))

    def shown(self, *lanes: Lane) -> list[tuple[str, float, float]]:
        """Name, begin and end of the slices in these lanes."""
        return [
            (item.name, (item.begin_ns + CLOCK_OFFSET_NS) / 1000, (item.end_ns + CLOCK_OFFSET_NS) / 1000)
            for item in self.slices()
            if item.lane in lanes
        ]

    def _add(self, category: str, name: str, begin: int, end: int, **args: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": float(begin), "dur": float(end - begin)}
        self.events.append(event | {"pid": 0, "tid": args.pop("tid"), "args": args})


def gathered() -> Profile:
    """A layer's forward: a gather behind a first product, and a second product that waits for it."""
    profile = Profile()
    profile.span("step", 0, 500, layer="step 3", site="")
    profile.span("module", 10, 100)
    communication = profile.span(
        "communication", 12, 20, method="ring", lane="AG", collective="send and receive", num_bytes=64
    )
    profile.kernel("void at::native::CopyFunctor<float>(int)", 13, 30, 35)
    profile.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 15, 40, 90, stream=NCCL)
    profile.span("product", 22, 30, method="ring", lane="GEMM")
    profile.kernel("nvjet_tst_128x64", 24, 36, 60)
    profile.span("wait", 32, 36, method="ring", lane="waiting", of=communication.number)
    profile.span("product", 40, 50, method="ring", lane="GEMM")
    profile.kernel("nvjet_tst_128x64", 42, 92, 120)
    profile.kernel("void at::native::vectorized_elementwise_kernel<4, Add>(int)", 200, 210, 220)
    return profile


def test_kernels_belong_to_what_launched_them() -> None:
    profile = gathered()
    assert profile.shown("GEMM") == [("fc1 forward ring", 36, 60), ("fc1 forward ring", 92, 120)]
    assert profile.shown("AG") == [("fc1 forward ring", 40, 90)]
    assert profile.shown("other kernels") == [("CopyFunctor", 30, 35), ("vectorized_elementwise_kernel", 210, 220)]
    assert profile.shown("layers") == [("step 3", 0, 500), ("fc1 forward", 30, 120)]
    gather = next(item for item in profile.slices() if item.lane == "AG")
    assert (gather.collective, gather.num_bytes, gather.kernel[:22]) == (
        "send and receive",
        64,
        "ncclDevKernel_SendRecv",
    )


def test_a_wait_lasts_from_the_kernel_before_it_to_the_end_of_the_communication() -> None:
    assert gathered().shown("waiting") == [("fc1 forward ring", 60, 90)]


def test_a_communication_that_was_finished_is_not_waited_for() -> None:
    profile = Profile()
    communication = profile.span("communication", 0, 5, lane="RS")
    profile.kernel("ncclDevKernel_ReduceScatter", 1, 10, 30, stream=NCCL)
    profile.span("product", 6, 9, lane="GEMM")
    profile.kernel("gemm", 7, 12, 50)
    profile.span("wait", 20, 22, lane="waiting", of=communication.number)
    profile.kernel("add", 24, 52, 60)
    assert profile.shown("waiting") == []


def test_a_host_that_is_late_is_not_a_wait() -> None:
    """The stream is idle from 20 on, and told to wait at 50: until then nobody waits."""
    profile = Profile()
    profile.span("product", 0, 5, lane="GEMM")
    profile.kernel("gemm", 1, 10, 20)
    communication = profile.span("communication", 6, 8, lane="AG")
    profile.kernel("ncclDevKernel_AllGather", 7, 25, 70, stream=NCCL)
    profile.span("wait", 50, 51, lane="waiting", of=communication.number)
    profile.kernel("add", 90, 95, 99)
    assert profile.shown("waiting") == [("fc1 forward", 50, 70)]


def test_waits_one_after_the_other_count_once() -> None:
    profile = Profile()
    profile.span("product", 0, 2, lane="GEMM")
    profile.kernel("gemm", 1, 5, 10)
    numbers = []
    for start, end in ((3, 40), (6, 60)):
        numbers.append(profile.span("communication", start, start + 2, lane="AG").number)
        profile.kernel("ncclDevKernel_SendRecv", start + 1, 8, end, stream=NCCL)
    for number, start in zip(numbers, (12, 14), strict=True):
        profile.span("wait", start, start + 1, lane="waiting", of=number)
    profile.kernel("add", 20, 61, 65)
    assert profile.shown("waiting") == [("fc1 forward", 12, 40), ("fc1 forward", 40, 60)]


def test_communication_of_nobody_we_know_is_of_the_replicas() -> None:
    profile = Profile()
    profile.span("module", 0, 50, site="backward")
    profile.kernel("ncclDevKernel_AllReduce_Sum_f32", 20, 30, 45, stream=NCCL)
    assert profile.shown("other comm") == [("step data parallel", 30, 45)]


def test_what_was_not_profiled_is_left_out() -> None:
    """Spans of the warm-up step have no annotation, and kernels launched before it no call."""
    profile = gathered()
    late = Span(number=99, kind="step", layer="step 2", site="", lane="layers")
    profile.spans.append(late)
    profile._add("kernel", "early", 1, 2, tid=COMPUTE, correlation=12345, stream=COMPUTE)
    assert "step 2" not in [item.name for item in profile.slices()]
    assert "early" not in [item.name for item in profile.slices()]
    assert device_slices({"traceEvents": []}, [late]) == []
