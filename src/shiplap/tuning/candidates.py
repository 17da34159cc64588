"""The ways a layer could do a pass, forward or backward: what is measured to find the fastest.

A *pass* is a layer's whole forward or its whole backward. A Column layer's backward has two sites whose communication
runs at the same time, so they are chosen together. The first way of every pass is the one in which nothing overlaps.

The switches say what may overlap; a plan refines how (`shiplap.config.parallel`):

| communication | in bulk, if | as a pipeline, if |
|---|---|---|
| Column forward, Row backward: all-gather | | `overlap_ag` |
| Row forward: reduce-scatter | | `overlap_rs` |
| Column backward: reduce-scatter | `bulk_dgrad` | `overlap_rs_dgrad` |
| Column backward: second all-gather | `bulk_wgrad` | `bulk_wgrad` |

where a layer that is denied its pipelines has neither of the two that Column's forward and its dgrad could have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shiplap.config import ModelParallelConfig
from shiplap.inspection.layers import ParallelLayer
from shiplap.overlap.method import IN_TURNS
from shiplap.overlap.plan import ColumnPlan, Keeps, RowPlan
from shiplap.tensor_parallel.linear import ColumnParallelLinear

Plan = ColumnPlan | RowPlan
Pass = Literal["forward", "backward"]
SEQUENTIAL = "sequential"
_BY_COLUMNS = ["columns:1,2,2,3", "columns:8", "tiles"]
"""Of gathers. By columns nothing hides the first piece, which therefore is a small one."""
_GATHERS_FOR_PARTS = {True: ["ring", "ring:2", *_BY_COLUMNS], False: ["ring", "grouped", *_BY_COLUMNS]}
"""By whether there are two ranks."""
_GATHERS_IN_TURNS = ["columns:1,2,2,3" + IN_TURNS, "columns:8" + IN_TURNS]
_SCATTERS_IN_TURNS = ["exchange" + IN_TURNS, "columns:8" + IN_TURNS]
"""Only where there are more than two ranks, and Gloo: what two send each other never meets others, and NCCL keeps the
order of what it is given."""
_PAIRED_PIPELINES = ["exchange", "columns", "columns" + IN_TURNS, "pieces:2,1,1"]
"""Of Column's dgrad. Their ends hide behind wgrad, so how they are cut matters less than elsewhere."""
_BESIDE = {
    "bulk": ("bulk", "direct", "exchange", "pieces:2,1,1"),
    "direct": ("direct", "exchange", "columns"),
    "direct in turns": ("direct in turns", "columns in turns"),
    "ring": ("direct",),
}
"""What is measured for Column's dgrad beside a gather that overlaps: mostly collectives with collectives, sends with
sends, and what the switches do."""


def sequential_plan(layer: ParallelLayer, *, keeps: Keeps = "shard") -> Plan:
    """The plan in which nothing overlaps."""
    if layer.kind == "column":
        return ColumnPlan(forward=SEQUENTIAL, dgrad=SEQUENTIAL, wgrad=SEQUENTIAL, keeps=keeps)
    return RowPlan(forward=SEQUENTIAL, dgrad=SEQUENTIAL)


def with_fields(plan: Plan, fields: Mapping[str, Any]) -> Plan:
    """The plan with other values in some of its fields."""
    changed: Plan = replace(plan, **fields)
    return changed


def candidates(
    layer: ParallelLayer,
    direction: Pass,
    parallel: ModelParallelConfig,
    *,
    keeps: Keeps = "shard",
    with_turns: bool = True,
) -> dict[str, Plan]:
    """Plans that differ in what they do in a pass, by a short name of that; the one that overlaps nothing first.

    Args:
        layer: the layer; its `has_backward` must be true if backward is asked for.
        direction: the pass.
        parallel: the switches, and the TP size.
        keeps: what a Column layer keeps for wgrad.
        with_turns: whether transfers may take turns, too.
    """
    nothing = sequential_plan(layer, keeps=keeps)
    choices = _choices(layer, direction, parallel, keeps=keeps)
    plans = {_name(fields): with_fields(nothing, fields) for fields in choices}
    may_take_turns = with_turns and parallel.tensor_parallel_size > 2
    return {name: plan for name, plan in plans.items() if may_take_turns or IN_TURNS not in name}


def _choices(
    layer: ParallelLayer, direction: Pass, parallel: ModelParallelConfig, *, keeps: Keeps
) -> Sequence[Mapping[str, str]]:
    """The fields of the plan in which the candidates differ."""
    size, overlap = parallel.tensor_parallel_size, parallel.tp_comm_overlap
    if isinstance(layer.module, ColumnParallelLinear):
        may_pipeline = overlap and not layer.module.disable_tp_comm_pipeline
        if direction == "forward":
            return [{"forward": way} for way in _gathers(size, pipeline=may_pipeline and parallel.tp_comm_overlap_ag)]
        scatters = [SEQUENTIAL]
        if layer.has_dgrad:
            # Bulk hides behind wgrad, so there must be one.
            bulk = overlap and parallel.tp_comm_bulk_dgrad and layer.has_wgrad
            scatters += ["bulk", "direct", "direct" + IN_TURNS] if bulk else []
            scatters += _PAIRED_PIPELINES if may_pipeline and parallel.tp_comm_overlap_rs_dgrad else []
        gathers = [SEQUENTIAL]
        if layer.gathers_again and keeps == "shard" and overlap and parallel.tp_comm_bulk_wgrad:
            gathers += (["bulk", "direct", "direct" + IN_TURNS] if layer.has_dgrad else []) + ["ring"]
        # The one without overlap first, then bulk overlap of both: if time is short, the last are not measured.
        pairs = [
            (scatter, gather)
            for gather in (*gathers[1:], SEQUENTIAL)
            for scatter in scatters
            if SEQUENTIAL in (gather, scatter) or scatter in _BESIDE[gather]
        ]
        pairs.sort(key=lambda pair: (pair != (SEQUENTIAL, SEQUENTIAL), pair[0] != pair[1]))
        return [
            ({"dgrad": scatter} if len(scatters) > 1 or len(gathers) == 1 else {})
            | ({"wgrad": gather} if len(gathers) > 1 else {})
            for scatter, gather in pairs
        ]
    if direction == "backward":
        # Without dgrad there is nothing to hide it behind but wgrad in parts.
        ways = _gathers(size, pipeline=overlap and parallel.tp_comm_overlap_ag)
        with_dgrad = ways if layer.has_dgrad else ways[:1]
        with_wgrad = [*_GATHERS_FOR_PARTS[size == 2], *_GATHERS_IN_TURNS] if layer.has_wgrad and len(ways) > 1 else []
        return [
            *({"dgrad": way} for way in with_dgrad),
            *({"dgrad": way, "wgrad": "parts"} for way in with_wgrad),
        ]
    pipelines = _scatter_pipelines(size) if overlap and parallel.tp_comm_overlap_rs else []
    return [{"forward": way} for way in (SEQUENTIAL, *pipelines)]


def _gathers(size: int, *, pipeline: bool) -> list[str]:
    """Ways to gather. At TP 2 a group of shards is a ring, and chunks are what helps; at larger TP few products do."""
    if not pipeline:
        return [SEQUENTIAL]
    by_rows = ["ring", "ring:2", "ring:4"] if size == 2 else ["ring", "grouped", f"grouped:1,{size - 1}"]
    return [SEQUENTIAL, *by_rows, *_BY_COLUMNS, *_GATHERS_IN_TURNS]


def _scatter_pipelines(size: int) -> list[str]:
    chunks = ["exchange:2", "exchange:4"] if size == 2 else ["exchange:2"]
    by_columns = ["columns:3,2,2,1", "columns:8", "tiles"]
    return ["exchange", *chunks, "reduce", "pieces:2,1,1", *by_columns, *_SCATTERS_IN_TURNS]


def _name(fields: Mapping[str, str]) -> str:
    """Such as `ring:2`, or `dgrad bulk, wgrad ring` where there are two sites."""
    if len(set(fields.values())) == 1 and SEQUENTIAL in fields.values():
        return SEQUENTIAL
    if len(fields) == 1:
        return next(iter(fields.values()))
    return ", ".join(f"{site} {way}" for site, way in fields.items())
