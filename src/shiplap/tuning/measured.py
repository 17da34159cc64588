"""A measured plan: which method is the fastest for each pass of each kind of layer, what was measured, and for what.

A kind of layer is what decides its speed: sizes, which gradients are computed, adapters, experts. Module paths are in
it for the reader; no behaviour depends on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shiplap.config import ModelParallelConfig, UserError
from shiplap.dist.collectives import size_of
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.models.decoder import DecoderModel
from shiplap.overlap.plan import ColumnPlan
from shiplap.tuning.candidates import Pass, Plan, candidates, sequential_plan, with_fields
from shiplap.tuning.probe import Workload

Description = Mapping[str, Any]


def describe(layer: ParallelLayer) -> Description:
    """What decides how fast a layer is, the same on all ranks."""
    module, experts = layer.module, layer.experts
    placement = module.placements.get("weight")
    # Only a Column layer may share its weight, such as a tied embedding's, which is divided along dim 0.
    full = (
        (module.weight.shape[0] * size_of(module.group), module.weight.shape[1])
        if placement is None
        else placement.full_shape
    )
    return {
        "kind": layer.kind,
        "out_features": full[0],
        "in_features": full[1],
        "bias": module.bias is not None,
        "gradients": [
            name
            for name, has in (("x", layer.has_dgrad), ("weight", layer.has_wgrad), ("bias", layer.has_bias_grad))
            if has
        ],
        "adapter_columns": None if layer.adapter is None else layer.adapter.down.shape[0],
        "experts": None if experts is None else experts.num_experts,
        "experts_per_token": None if experts is None else experts.router.experts_per_token,
        "is_denied_pipelines": bool(getattr(module, "disable_tp_comm_pipeline", False)),
    }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One way of doing a pass.

    Attributes:
        median_ms: of the slowest rank.
        rounds: that it was measured in; one that is clearly slower drops out early.
        speedup: of it against the first way: the typical ratio of a round (`shiplap.tuning.statistics`).
    """

    median_ms: float
    rounds: int
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What keeping the gathered input would change in a Column layer's backward, against keeping the shard.

    Attributes:
        method: the fastest way with it.
        speedup: of the whole backward, each with its fastest way.
        is_clear: whether one of the two is clearly faster, or the two are clearly alike.
        memory_bytes: more on each rank, of one layer and micro-batch.
    """

    method: str
    speedup: float
    is_clear: bool
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """The fastest way of one pass of one kind of layer.

    Attributes:
        layers: module paths of the layers, folded.
        layer: what decides its speed, from `describe`.
        direction: the pass.
        method: the chosen way, by its name among the candidates.
        fields: what it is in a plan.
        is_clear: whether it is clearly faster than no overlap, or clearly nothing is.
        speedup: of it against no overlap.
        timings: of all candidates, by name.
        kept: of a Column layer's backward, what keeping more would change; None if that was not measured.
    """

    layers: Sequence[str]
    layer: Description
    direction: Pass
    method: str
    fields: Mapping[str, str]
    is_clear: bool
    speedup: float
    timings: Mapping[str, Timing]
    kept: Kept | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a plan was measured for and on. All of it is known before anything is measured, on every rank.

    Attributes:
        tensor_parallel: ranks.
        data_parallel: replicas, which measured at the same time.
        sequence: padded tokens.
        batch: sequences in a micro-batch.
        dtype: of the computation.
        device: `cpu` or `cuda`.
        hardware: the device's name.
        ranks_per_host: on the first host.
        threads: of a rank, on the CPU.
        pytorch: version.
        shiplap: version.
    """

    tensor_parallel: int
    data_parallel: int
    sequence: int
    batch: int
    dtype: str
    device: str
    hardware: str
    ranks_per_host: int
    threads: int
    pytorch: str
    shiplap: str

    @property
    def workload(self) -> Workload:
        """What each layer was run on."""
        return Workload(sequence=self.sequence, batch=self.batch, dtype=self.dtype)


_MUST_AGREE = {
    "tensor_parallel": "--tensor-parallel",
    "sequence": "a padded --sequence-length of",
    "batch": "--batch-size",
    "dtype": "--dtype",
    "device": "--device",
}
"""In words. Another value makes other messages or products. The rest may differ, but is said."""
_ALL_ON = {
    f"tp_comm_{name}": True
    for name in ("overlap", "bulk_wgrad", "bulk_dgrad", "overlap_ag", "overlap_rs", "overlap_rs_dgrad")
}


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """Which method at every site, measured.

    Attributes:
        source: where it comes from, for messages.
        made: date and time, in UTC.
        conditions: what it is for.
        passes: what was measured.
    """

    source: str
    made: str
    conditions: Conditions
    passes: Sequence[MeasuredPass]

    def plan_of(self, layer: ParallelLayer) -> Plan | None:
        """The plan of a layer; None if no layer of its kind was measured."""
        description = describe(layer)
        found = [measured for measured in self.passes if measured.layer == description]
        needed = {"forward", "backward"} if layer.has_backward else {"forward"}
        if not needed <= {measured.direction for measured in found}:
            return None
        plan = sequential_plan(layer)
        for measured in found:
            plan = with_fields(plan, measured.fields)
        return with_fields(plan, {"is_measured": True})

    def apply(self, model: DecoderModel) -> None:
        """Give every parallel layer its plan."""
        for layer in parallel_layers(model):
            plan = self.plan_of(layer)
            assert plan is not None, "check() was not asked"
            layer.module.plan = plan

    def check(self, model: DecoderModel, parallel: ModelParallelConfig, conditions: Conditions) -> None:
        """Refuse a plan that is not for this run.

        Args:
            model: the run's, or its skeleton.
            parallel: its switches.
            conditions: of the run.

        Raises:
            UserError: other shapes, layers that were not measured, or methods that the switches do not let overlap.
        """
        for name, in_words in _MUST_AGREE.items():
            theirs, ours = getattr(self.conditions, name), getattr(conditions, name)
            if theirs != ours:
                raise UserError(
                    f"{self.source} was measured for {in_words} {theirs}, and this run has {ours}. Run `shiplap tune` "
                    "with this run's options, or use --tp-comm-plan auto."
                )
        for layer in parallel_layers(model):
            plan = self.plan_of(layer)
            if plan is None:
                raise UserError(
                    f"{self.source} has nothing about layers like {layer.path}: {_in_words(describe(layer))}. Run "
                    "`shiplap tune` with this run's options, or use --tp-comm-plan auto."
                )
            self._check_allowed(layer, plan, parallel)

    def _check_allowed(self, layer: ParallelLayer, plan: Plan, parallel: ModelParallelConfig) -> None:
        is_shard = isinstance(plan, ColumnPlan) and plan.keeps == "shard"
        if parallel.tp_comm_keep_gathered and layer.gathers_again and is_shard:
            raise UserError(
                f"{self.source} keeps the shard of the input at {layer.path}, and --tp-comm-keep-gathered all of it. "
                "Drop the flag, or run `shiplap tune` with it."
            )
        directions: tuple[Pass, ...] = ("forward", "backward") if layer.has_backward else ("forward",)
        for direction in directions:
            if _is_candidate(plan, layer, direction, parallel):
                continue
            says = f"{_in_words(_methods(plan, direction))} for the {direction} pass of {layer.path}"
            if _is_candidate(plan, layer, direction, replace(parallel, **_ALL_ON)):
                raise UserError(
                    f"{self.source} says {says}, which this run's --tp-comm-… switches turn off. Turn on what was on "
                    "when the plan was measured (perhaps --tp-comm-overlap-rs-dgrad), or run `shiplap tune` with this "
                    "run's options."
                )
            raise UserError(
                f"{self.source} says {says}, which is no method that `shiplap tune` measures there with "
                f"--tensor-parallel {parallel.tensor_parallel_size}. Measure again, or mend the file."
            )

    def differences(self, conditions: Conditions) -> list[str]:
        """What is otherwise than when it was measured, though the plan can be used, in words."""
        theirs, ours = asdict(self.conditions), asdict(conditions)
        return [
            f"{name} {theirs[name]} then, {ours[name]} now"
            for name in theirs
            if name not in _MUST_AGREE and theirs[name] != ours[name]
        ]


def _in_words(description: Description) -> str:
    return ", ".join(f"{name} {value}" for name, value in description.items() if value is not None)


def _methods(plan: Plan, direction: Pass) -> Mapping[str, object]:
    """What a plan does in a pass, by site."""
    sites = ("forward",) if direction == "forward" else ("dgrad", "wgrad")
    return {site: getattr(plan, site) for site in sites if hasattr(plan, site)}


def _is_candidate(plan: Plan, layer: ParallelLayer, direction: Pass, parallel: ModelParallelConfig) -> bool:
    """Whether the switches let it be measured. Candidates' names do not tell: they say less where less varies."""
    keeps = plan.keeps if isinstance(plan, ColumnPlan) else "shard"
    ways = candidates(layer, direction, parallel, keeps=keeps).values()
    return any(_methods(plan, direction) == _methods(way, direction) for way in ways)
