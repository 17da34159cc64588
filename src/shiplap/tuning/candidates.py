"""The methods with which a layer could do a pass, forward or backward: what is measured to find the fastest.

A *pass* is a layer's whole forward or its whole backward. A Column layer's backward has two sites whose communication
runs at the same time, so they are chosen together. The first candidate of every pass is the one in which nothing
overlaps; the others are those that the methods declare of themselves (`shiplap.overlap.registry`).

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
from shiplap.overlap import registry
from shiplap.overlap.plan import ColumnPlan, Keeps, RowPlan
from shiplap.overlap.primitives import Method, Where
from shiplap.overlap.registry import SEQUENTIAL
from shiplap.tensor_parallel.linear import ColumnParallelLinear

Plan = ColumnPlan | RowPlan
Pass = Literal["forward", "backward"]
Fields = Mapping[str, Method | str]


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
    with_pacing: bool = True,
) -> dict[str, Plan]:
    """Plans that differ in what they do in a pass, by a short name of that; the one that overlaps nothing first.

    Args:
        layer: the layer; its `has_backward` must be true if backward is asked for.
        direction: the pass.
        parallel: the switches, and the TP size.
        keeps: what a Column layer keeps for wgrad.
        with_pacing: whether paced methods are among them. Between two ranks no transfers meet, so that they never are.
    """
    nothing = sequential_plan(layer, keeps=keeps)
    choices = _choices(layer, direction, parallel, keeps=keeps)
    may_pace = with_pacing and parallel.tensor_parallel_size > 2
    return {
        _name(fields): with_fields(nothing, fields)
        for fields in choices
        if may_pace or not any(isinstance(method, Method) and method.paced for method in fields.values())
    }


def _choices(layer: ParallelLayer, direction: Pass, parallel: ModelParallelConfig, *, keeps: Keeps) -> Sequence[Fields]:
    """The fields of the plan in which the candidates differ."""
    size, overlap = parallel.tensor_parallel_size, parallel.tp_comm_overlap
    if isinstance(layer.module, ColumnParallelLinear):
        may_pipeline = overlap and not layer.module.disable_tp_comm_pipeline
        if direction == "forward":
            methods = _if(may_pipeline and parallel.tp_comm_overlap_ag, "gather", size)
            return [{"forward": method} for method in (SEQUENTIAL, *methods)]
        scatters = [SEQUENTIAL]
        if layer.has_dgrad:
            found = _if(overlap, "scatter beside wgrad", size)
            # Bulk hides behind wgrad, so there must be one.
            bulk = parallel.tp_comm_bulk_dgrad and layer.has_wgrad
            pipelined = may_pipeline and parallel.tp_comm_overlap_rs_dgrad
            scatters += [one for one in found if (bulk if one.kind.cut == "whole" else pipelined)]
        gathers = [SEQUENTIAL]
        if layer.gathers_again and keeps == "shard":
            found = _if(overlap and parallel.tp_comm_bulk_wgrad, "second gather", size)
            gathers += [one for one in found if layer.has_dgrad or one.kind.cut != "whole"]
        # The one without overlap first, then bulk overlap of both: if time is short, the last are not measured.
        pairs = [
            (scatter, gather)
            for gather in (*gathers[1:], SEQUENTIAL)
            for scatter in scatters
            if _is_pair(scatter, gather)
        ]
        pairs.sort(key=lambda pair: (pair != (SEQUENTIAL, SEQUENTIAL), pair[0] != pair[1]))
        return [
            ({"dgrad": scatter} if len(scatters) > 1 or len(gathers) == 1 else {})
            | ({"wgrad": gather} if len(gathers) > 1 else {})
            for scatter, gather in pairs
        ]
    if direction == "backward":
        may_gather = overlap and parallel.tp_comm_overlap_ag
        # Without dgrad there is nothing to hide it behind but wgrad in parts.
        with_dgrad = (SEQUENTIAL, *_if(may_gather and layer.has_dgrad, "gather", size))
        with_wgrad = _if(may_gather and layer.has_wgrad, "gather for wgrad too", size)
        in_parts: list[Fields] = [{"dgrad": method, "wgrad": "parts"} for method in with_wgrad]
        return [*({"dgrad": method} for method in with_dgrad), *in_parts]
    pipelines = _if(overlap and parallel.tp_comm_overlap_rs, "scatter", size)
    return [{"forward": method} for method in (SEQUENTIAL, *pipelines)]


def _if(is_allowed: bool, where: Where, size: int) -> Sequence[Method]:
    return registry.candidates(where, size) if is_allowed else ()


def _is_pair(scatter: Method, gather: Method) -> bool:
    """Whether the two are measured together in a Column layer's backward.

    Sends go beside sends, and what is paced beside what is paced. Beside a collective everything is measured that is
    not paced: the switches mean a pipeline there. A gather that is a pipeline itself goes beside a whole scatter only.
    """
    if SEQUENTIAL in (scatter, gather):
        return True
    if scatter.paced != gather.paced or (gather.kind.cut != "whole" and scatter.kind.cut != "whole"):
        return False
    return gather.kind.transport in ("collective", scatter.kind.transport)


def _name(fields: Fields) -> str:
    """Such as `ring:2`, or `dgrad bulk, wgrad ring` where there are two sites."""
    if set(fields.values()) == {SEQUENTIAL}:
        return str(SEQUENTIAL)
    if len(fields) == 1:
        return str(next(iter(fields.values())))
    return ", ".join(f"{site} {method}" for site, method in fields.items())
