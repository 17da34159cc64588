"""One parallel layer of a model alone on this rank's device, to be run under any plan and timed.

It is the layer itself, copied from a model without memory, with random weights and inputs: what is measured has the
shapes, the frozen weights, the adapter and the experts of the model's own.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shiplap.dist import GlobalEnv
from shiplap.dist.collectives import MAX, Group, all_reduce, size_of
from shiplap.inspection.layers import ParallelLayer
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.tensor_parallel.experts import Assignment, FromExperts, ToExperts
from shiplap.tensor_parallel.gemm import DENSE, Gemm
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.low_rank import LowRankAdapter
from shiplap.tuning.hollow import Hollow, HollowAdapter

Plan = ColumnPlan | RowPlan
ParallelLinear = ColumnParallelLinear | RowParallelLinear
Direction = Literal["forward", "backward"]
_LEAST_MS = 5.0
"""What takes less is run several times in a row: clock and start are small against it. Several short measurements say
more than a long one, if which threads share a core is decided anew for each (docs/experiments.md)."""
_MOST_REPEATS = 50
_MUCH_MS = 20.0
"""What takes so long is not worth a second call to learn how long it takes."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a layer is run on.

    Attributes:
        sequence: tokens of a sequence, padded to a multiple of the TP size.
        batch: sequences in a micro-batch.
        dtype: `float32` or `bfloat16`, that it computes in.
    """

    sequence: int
    batch: int
    dtype: str


class Stopwatch:
    """Adds up spans of time on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        """At zero."""
        self._is_cuda = device.type == "cuda"
        self._milliseconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A span is inside. On CUDA it is the current stream's, and nothing waits for it here."""
        if self._is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._milliseconds += 1e3 * (time.perf_counter() - begun)

    def milliseconds(self) -> float:
        """All spans together, once the device has finished them."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._milliseconds + sum(float(begin.elapsed_time(end)) for begin, end in self._events)


class Repeats:
    """Runs what takes little time several times in a row, each thing always equally often."""

    def __init__(self) -> None:
        """Of nothing yet."""
        self._of: dict[str, int] = {}

    def __getitem__(self, key: str) -> int:
        """How often a thing that was timed before is run."""
        return self._of[key]

    def milliseconds(self, key: str, time_it: Callable[[int], float]) -> float:
        """Of one run.

        Args:
            key: names the thing.
            time_it: runs it so many times; the milliseconds of all of them, the same on all ranks.
        """
        if key not in self._of:
            once = time_it(1)
            # The first one also pays for memory and for connections between ranks.
            once = time_it(1) if once < _MUCH_MS else once
            self._of[key] = min(int(_LEAST_MS / max(once, 1e-3)) + 1, _MOST_REPEATS)
        return time_it(self._of[key]) / self._of[key]


class Probe:
    """A layer that can be timed.

    Attributes:
        layer: what it was made from.
        env: this rank's place.
    """

    def __init__(
        self, layer: ParallelLayer, workload: Workload, env: GlobalEnv, *, module: ParallelLinear | None = None
    ) -> None:
        """Make the layer on this rank's device.

        Args:
            layer: of a model without memory, this rank's shard (`shiplap.inspection.meta_model`).
            workload: what it is run on.
            env: this rank's place.
            module: the layer with memory and weights, to be used as it is; by default one is made.
        """
        self.layer = layer
        self.env = env
        self._workload = workload
        if module is None:
            module = copy.deepcopy(layer.module).to_empty(device=env.device)
            for parameter in module.parameters():
                nn.init.normal_(parameter.detach(), std=0.02)
        self._module = module
        self._adapter = self._module.adapter
        self._trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._gemm = _gemm_of(layer, workload, env.device)
        self._inputs: dict[int, Tensor] = {}
        self._repeats = Repeats()

    def milliseconds(self, direction: Direction, plan: Plan) -> float:
        """How long the layer takes under a plan, on the slowest rank of the whole job.

        All ranks must ask for the same at the same time. In a row of calls each rank waits for the others by its own
        communication only, as in training.
        """
        self._set(plan, self.env.group("tp"))
        return self._slowest(direction, str(plan), self._gemm)

    def seconds_of_a_measurement(self, direction: Direction, plan: Plan) -> float:
        """How long measuring takes: the forward before each backward is not in `milliseconds`, but takes its time."""
        once = self.milliseconds(direction, plan)
        once += self.milliseconds("forward", plan) if direction == "backward" else 0.0
        return 1e-3 * once * self._repeats[f"{direction} {plan}"]

    def products_milliseconds(self, direction: Direction) -> float:
        """The layer's products alone, whole: as if this rank had everything that the others would send."""
        self._set(ColumnPlan() if self.layer.kind == "column" else RowPlan(), None)
        return self._slowest(direction, "products", self._gemm)

    def communication_milliseconds(self, direction: Direction, plan: Plan) -> float:
        """The layer's communication alone, as a plan does it, with no product to hide it behind."""
        self._set(plan, self.env.group("tp"), is_hollow=True)
        return self._slowest(direction, f"communication, {plan}", Hollow(of=self._gemm))

    def _set(self, plan: Plan, group: Group, *, is_hollow: bool = False) -> None:
        self._module.group = group
        self._module.plan = plan
        if isinstance(self._adapter, LowRankAdapter):
            self._adapter.group = group
            # A module's submodule cannot be replaced by what is none.
            del self._module.adapter
            self._module.adapter = HollowAdapter(self._adapter) if is_hollow else self._adapter

    def _slowest(self, direction: Direction, what: str, gemm: Gemm) -> float:
        return self._repeats.milliseconds(
            f"{direction} {what}",
            lambda repeats: slowest_rank(self._time(direction, gemm, repeats), self.env),
        )

    def _time(self, direction: Direction, gemm: Gemm, repeats: int) -> float:
        """Milliseconds of so many passes on this rank; of backward ones without the forward before each."""
        x, device = self._input(), self.env.device
        needed = [x, *self._trained] if x.requires_grad else self._trained
        stopwatch, untimed = Stopwatch(device), Stopwatch(device)
        dy: Tensor | None = None
        for _ in range(repeats):
            with stopwatch.running() if direction == "forward" else untimed.running():
                with torch.autocast(device.type, torch.bfloat16, enabled=self._workload.dtype == "bfloat16"):
                    y = self._module(x, gemm)
            if direction == "backward":
                dy = torch.randn_like(y) if dy is None else dy
                with stopwatch.running():
                    torch.autograd.grad(y, needed, dy)
        return stopwatch.milliseconds()

    def _input(self) -> Tensor:
        module, sequence, batch = self._module, self._workload.sequence, self._workload.batch
        is_shard = self.layer.kind == "column" and module.sequence_parallel and module.group is not None
        rows = sequence // size_of(module.group) if is_shard else sequence
        if rows not in self._inputs:
            slots = (self._gemm.assignment.num_slots,) if isinstance(self._gemm, FromExperts) else ()
            x = torch.randn(rows, batch, *slots, module.weight.shape[1], device=self.env.device)
            x = x.to(getattr(torch, self._workload.dtype))
            self._inputs[rows] = x.requires_grad_(self.layer.has_dgrad)
        return self._inputs[rows]


def _gemm_of(layer: ParallelLayer, workload: Workload, device: torch.device) -> Gemm:
    if layer.experts is None:
        return DENSE
    # Alike on all ranks, as a router's decision is; every expert is as likely as another.
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(workload.sequence, workload.batch, layer.experts.num_experts, generator=generator)
    chosen = scores.topk(layer.experts.router.experts_per_token, dim=-1).indices.to(device)
    assignment = Assignment(experts=chosen, num_experts=layer.experts.num_experts)
    if layer.kind == "column":
        return ToExperts(assignment=assignment)
    return FromExperts(assignment=assignment)


def slowest_rank(milliseconds: float, env: GlobalEnv) -> float:
    """The largest of all ranks' times, the same on every rank: they leave together."""
    largest = torch.tensor(milliseconds, device=env.device)
    for group in env.groups.values():
        largest = all_reduce(largest, group, MAX).wait()
    return float(largest)
