"""What a model's parallel linear layers communicate, what overlaps, and why not where it does not.

Each layer has the sites of `shiplap.overlap.plan`, and at each its plan names a method. What really happens follows
from the method and from which gradients are computed (`shiplap.tensor_parallel.function`): a frozen weight has no
wgrad, so nothing is gathered for it, and a scatter that would hide behind it hides behind nothing. This module reads
plans and parameters and communicates nothing, so it works on a model on the meta device as on one in training.

Not in here: what embedding, norms, router and loss communicate, which no switch overlaps.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shiplap.config import ModelParallelConfig, TrainConfig
from shiplap.dist.collectives import size_of
from shiplap.inspection.layers import Kind, ParallelLayer, parallel_layers
from shiplap.models.decoder import DecoderModel
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan
from shiplap.overlap.primitives import Method
from shiplap.overlap.registry import REPLICATED, SEQUENTIAL
from shiplap.tensor_parallel.linear import ColumnParallelLinear

BYTES_OF = {"float32": 4, "bfloat16": 2}


class Reason(StrEnum):
    """Why a site does not overlap."""

    TP_1 = "tp_1"
    NO_SEQUENCE_PARALLEL = "no_sequence_parallel"
    MASTER_SWITCH_OFF = "master_switch_off"
    SWITCH_OFF = "switch_off"
    LAYER_DISABLED = "layer_disabled"
    FROZEN_WEIGHT = "frozen_weight"
    INPUT_WITHOUT_GRADIENT = "input_without_gradient"
    NOTHING_TO_HIDE_BEHIND = "nothing_to_hide_behind"
    KEPT_GATHERED = "kept_gathered"
    PLAN_REPLACED = "plan_replaced"
    NOT_FASTER = "not_faster"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One site of one kind of layer. The names are the keys of `shiplap explain --json`.

    Attributes:
        layer: module path with the block number folded: `*` for all blocks, or their numbers.
        num_layers: that it stands for.
        kind: of the layer.
        site: `forward`, `dgrad` or, of a Column layer, `wgrad`.
        communicates: such as `all-gather x`, or `nothing`.
        method: the plan's.
        hidden_behind: the product that the communication overlaps with; None if it overlaps with nothing.
        switch: the flag that lets it overlap; None if nothing overlaps, or a replaced plan makes it.
        disabled_by: the flag that denies this layer its pipelines; None if it may have them.
        is_plan_replaced: whether the method is not the one that the switches mean.
        is_measured: whether it was chosen by measuring.
        reason: why nothing overlaps; None if something does.
        why_not: the same in words, with the flag's name.
        message_bytes_per_rank: what each rank sends in one message of one layer, and receives: (R - 1) / R of the
            whole activation for a gather or a scatter, twice that for an all-reduce. In what number of pieces is the
            method's business.
        messages_per_micro_batch: of one layer: 1, or 2 where recomputation runs forward again; 0 if nothing is sent.
    """

    layer: str
    num_layers: int
    kind: Kind
    site: str
    communicates: str
    method: str
    hidden_behind: str | None
    switch: str | None
    disabled_by: str | None
    is_plan_replaced: bool
    is_measured: bool
    reason: Reason | None
    why_not: str
    message_bytes_per_rank: int
    messages_per_micro_batch: int

    @property
    def bytes_per_rank_and_micro_batch(self) -> int:
        """What each rank sends at this site, of all layers of the kind."""
        return self.message_bytes_per_rank * self.messages_per_micro_batch * self.num_layers


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A site of a kind of layer.

    Attributes:
        collective: what it does under sequence parallelism.
        tensor: what it does it to.
        switches: the fields of the configuration that make it overlap, the one that has precedence first.
        whole_behind: the product that methods which do not cut it hide it behind; pipelines use the site's own.
    """

    site: str
    collective: Literal["all-gather", "reduce-scatter"]
    tensor: str
    switches: tuple[str, ...]
    whole_behind: str | None = None


PLACES: dict[Kind, tuple[_Place, ...]] = {
    "column": (
        _Place(site="forward", collective="all-gather", tensor="x", switches=("tp_comm_overlap_ag",)),
        _Place(
            site="dgrad",
            collective="reduce-scatter",
            tensor="dx",
            switches=("tp_comm_overlap_rs_dgrad", "tp_comm_bulk_dgrad"),
            whole_behind="wgrad",
        ),
        _Place(
            site="wgrad", collective="all-gather", tensor="x", switches=("tp_comm_bulk_wgrad",), whole_behind="dgrad"
        ),
    ),
    "row": (
        _Place(site="forward", collective="reduce-scatter", tensor="y", switches=("tp_comm_overlap_rs",)),
        _Place(site="dgrad", collective="all-gather", tensor="dy", switches=("tp_comm_overlap_ag",)),
    ),
}

# The switches that a Column layer can be denied, and by which option; a report may know layers by their names.
COLUMN_PIPELINES = ("tp_comm_overlap_ag", "tp_comm_overlap_rs_dgrad")
DISABLE_OPTIONS = {"qkv": "tp_comm_overlap_disable_qkv", "fc1": "tp_comm_overlap_disable_fc1"}


Why = tuple[Reason, str]


def sites_of_run(model: DecoderModel, config: TrainConfig) -> list[Site]:
    """`communication_sites` of the model of a run, or of its skeleton."""
    return communication_sites(
        model,
        config.parallel,
        batch_size=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        dtype=config.run.dtype,
    )


def communication_sites(
    model: DecoderModel, parallel: ModelParallelConfig, *, batch_size: int, sequence_length: int, dtype: str
) -> list[Site]:
    """Every site of every kind of layer, in the order of the model. Layers of one path that differ come apart.

    Args:
        model: this rank's shard, on any device; its layers' plans and its parameters' `requires_grad` are read.
        parallel: topology and switches that it was built with.
        batch_size: sequences in a micro-batch.
        sequence_length: tokens in a sequence, before padding.
        dtype: `float32` or `bfloat16`, that it computes in.
    """
    padded = sequence_length + -sequence_length % size_of(model.token_group)
    feature_bytes = padded * batch_size * BYTES_OF[dtype]
    return _fold(
        [
            (layer.path, [_site(place, layer, parallel, feature_bytes=feature_bytes) for place in PLACES[layer.kind]])
            for layer in parallel_layers(model)
        ]
    )


def _site(place: _Place, layer: ParallelLayer, parallel: ModelParallelConfig, *, feature_bytes: int) -> Site:
    plan = layer.module.plan
    method: Method = getattr(plan, place.site)
    disabled_by = _disabled_by(layer, parallel)
    is_replaced = _expected(place, layer, parallel) != (method, _besides(place, plan))
    nothing = _why_nothing(place, layer, parallel)
    behind, why = (None, nothing) if nothing else _overlap(place, layer, method)
    if behind is None and why is None:
        why = _why_not_asked(place, layer, parallel, is_replaced=is_replaced, disabled_by=disabled_by)
    switch = None
    if behind is not None and (plan.is_measured or not is_replaced):
        # Of the two that Column's reduce-scatter has, the second one is that of bulk overlap.
        switch = flag(place.switches[-1 if method.kind.cut == "whole" else 0])
    collective = "all-reduce" if method == REPLICATED else place.collective
    size = parallel.tensor_parallel_size
    rounds = 2 if collective == "all-reduce" else 1
    return Site(
        layer=layer.path,
        num_layers=1,
        kind=layer.kind,
        site=place.site,
        communicates="nothing" if nothing else f"{collective} {place.tensor}",
        method=str(method),
        hidden_behind=behind,
        switch=switch,
        disabled_by=disabled_by,
        is_plan_replaced=is_replaced,
        is_measured=plan.is_measured,
        reason=why[0] if why else None,
        why_not=why[1] if why else "",
        message_bytes_per_rank=0 if nothing else rounds * feature_bytes * layer.width * (size - 1) // size,
        messages_per_micro_batch=0 if nothing else 1 + (place.site == "forward" and layer.is_recomputed),
    )


def _besides(place: _Place, plan: ColumnPlan | RowPlan) -> str:
    """What the plan says of a site besides the method: what Column keeps for wgrad, and how Row computes wgrad."""
    if isinstance(plan, ColumnPlan):
        return plan.keeps if place.site == "wgrad" else ""
    return plan.wgrad if place.site == "dgrad" else ""


def _expected(place: _Place, layer: ParallelLayer, parallel: ModelParallelConfig) -> tuple[Method, str]:
    """The method that the switches mean, and what they mean besides."""
    if isinstance(layer.module, ColumnParallelLinear):
        column = column_plan(parallel, disable_pipeline=layer.module.disable_tp_comm_pipeline)
        return getattr(column, place.site), _besides(place, column)
    row = row_plan(parallel)
    return getattr(row, place.site), _besides(place, row)


def _why_nothing(place: _Place, layer: ParallelLayer, parallel: ModelParallelConfig) -> Why | None:
    """Why nothing is communicated at the site; None if something is."""
    if parallel.tensor_parallel_size == 1:
        return Reason.TP_1, "TP 1"
    at = (layer.kind, place.site)
    if at == ("column", "dgrad") and not layer.has_dgrad:
        return Reason.INPUT_WITHOUT_GRADIENT, "nothing before it is trained: no dgrad"
    if at == ("row", "dgrad") and not (layer.has_dgrad or layer.has_wgrad or layer.has_bias_grad):
        return Reason.INPUT_WITHOUT_GRADIENT, "nothing here or before it is trained"
    if at == ("column", "wgrad") and not layer.has_wgrad:
        return Reason.FROZEN_WEIGHT, "frozen weight: no wgrad, nothing to gather"
    if at == ("column", "wgrad") and layer.adapter is not None:
        return Reason.FROZEN_WEIGHT, "frozen weight: the adapter keeps what it needs"
    if place.collective == "all-gather" and not parallel.sequence_parallel:
        return Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism: nothing to gather"
    if _besides(place, layer.module.plan) == "gathered":
        measured = layer.module.plan.is_measured and not parallel.tp_comm_keep_gathered
        by = "the measured plan" if measured else "--tp-comm-keep-gathered"
        by = by if measured or parallel.tp_comm_keep_gathered else "a replaced plan"
        return Reason.KEPT_GATHERED, f"x is kept as gathered in forward, by {by}"
    return None


def _overlap(place: _Place, layer: ParallelLayer, method: Method) -> tuple[str | None, Why | None]:
    """The product that the method hides the communication behind, or why there is none.

    Neither, if the method does not try to overlap.
    """
    if method in (REPLICATED, SEQUENTIAL):
        return None, None
    if not method.kind.overlaps(method):
        return None, (Reason.NOTHING_TO_HIDE_BEHIND, f"{method} has one product, which needs everything")
    product = place.whole_behind if method.kind.cut == "whole" else place.site
    if product is None:
        return None, (Reason.NOTHING_TO_HIDE_BEHIND, f"{method.kind.name} has no other product here to hide behind")
    products = [product, *(["wgrad"] if _besides(place, layer.module.plan) == "parts" else [])]
    there = [product for product in products if layer.has_product(product)]
    if not there:
        cause = "frozen weight" if product == "wgrad" else "nothing before it is trained"
        return None, (Reason.NOTHING_TO_HIDE_BEHIND, f"{cause}: no {product} to hide behind")
    if layer.adapter is not None:
        there = [f"adapter {product}" if product == "wgrad" else product for product in there]
    return " and ".join(there), None


def _why_not_asked(
    place: _Place, layer: ParallelLayer, parallel: ModelParallelConfig, *, is_replaced: bool, disabled_by: str | None
) -> Why:
    """Why the plan's method at the site does not even try to overlap."""
    if is_replaced and layer.module.plan.is_measured:
        return Reason.NOT_FASTER, "measured: nothing that overlaps is clearly faster"
    if is_replaced:
        expected, _ = _expected(place, layer, parallel)
        return Reason.PLAN_REPLACED, f"plan replaced: the switches say {expected}"
    if not parallel.sequence_parallel:
        return Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism"
    if not parallel.tp_comm_overlap:
        return Reason.MASTER_SWITCH_OFF, "--tp-comm-overlap is off"
    off = [flag(field) for field in place.switches if not getattr(parallel, field)]
    text = f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off" if off else ""
    if len(off) < len(place.switches):
        return Reason.LAYER_DISABLED, f"{disabled_by} is on" + (f", {text}" if off else "")
    return Reason.SWITCH_OFF, text


def _disabled_by(layer: ParallelLayer, parallel: ModelParallelConfig) -> str | None:
    if not isinstance(layer.module, ColumnParallelLinear) or not layer.module.disable_tp_comm_pipeline:
        return None
    option = DISABLE_OPTIONS.get(layer.path.rpartition(".")[2])
    return flag(option) if option and getattr(parallel, option) else "the layer's own disable_tp_comm_pipeline"


def flag(field: str) -> str:
    """The flag of a switch."""
    return "--" + field.replace("_", "-")


def _fold(of_layers: Sequence[tuple[str, Sequence[Site]]]) -> list[Site]:
    """Layers that differ in nothing but the block's number, as one."""
    numbers: dict[str, dict[tuple[Site, ...], list[int]]] = defaultdict(dict)
    for path, sites in of_layers:
        folded, number = folded_path(path)
        alike = tuple(replace(site, layer="") for site in sites)
        numbers[folded].setdefault(alike, []).append(number)
    return [
        replace(site, layer=folded if len(variants) == 1 else folded.replace("*", _ranges(own)), num_layers=len(own))
        for folded, variants in numbers.items()
        for alike, own in variants.items()
        for site in alike
    ]


def folded_path(path: str) -> tuple[str, int]:
    """The path with `*` for the block's number, and that number; 0 where there is none."""
    found = re.search(r"\.(\d+)\.", path)
    return (path, 0) if found is None else (f"{path[: found.start()]}.*.{path[found.end() :]}", int(found[1]))


def _ranges(numbers: Sequence[int]) -> str:
    """`0,2-4` for 0, 2, 3, 4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
