"""What overlaps at one layer, and how: the switches, resolved.

A parallel linear layer communicates at these sites, each done by one method (`shiplap.overlap.registry`):

| layer | site | communication | GEMM it can hide behind |
|---|---|---|---|
| Column | `forward` | all-gather of x | forward |
| Column | `dgrad` | reduce-scatter of dx | dgrad itself (pipelined), or wgrad (bulk) |
| Column | `wgrad` | all-gather of x, again | dgrad (bulk), or wgrad itself (pipelined) |
| Row | `forward` | reduce-scatter of y | forward |
| Row | `dgrad` | all-gather of dy, used by wgrad too | dgrad |

What a Column layer keeps for wgrad is a choice too: its `shard` of x, which is gathered again in backward, or x as it
was `gathered` in forward, R times as much memory and no second gather.

A Row layer's gathered dy serves wgrad too, which is computed as a `whole` after dgrad, or in the same `parts`: then the
gather hides behind both.

Without sequence parallelism every site is replicated: activations are whole on each rank, so a gather is nothing
and a scatter is an all-reduce.
"""

from dataclasses import dataclass, field
from typing import Literal

from shiplap.config.parallel import ModelParallelConfig
from shiplap.overlap import registry
from shiplap.overlap.primitives import Method
from shiplap.overlap.registry import REPLICATED, SEQUENTIAL

Keeps = Literal["shard", "gathered"]
Parts = Literal["whole", "parts"]


def _resolved(given: Method | str, site: str, *, can: tuple[str, ...]) -> Method:
    """The method of a site.

    Raises:
        ValueError: there is no such method, or not for this site.
    """
    method = registry.method(given) if isinstance(given, str) else given
    if not any(getattr(method.kind, need) for need in can):
        others = [kind.name for kind in registry.kinds() if any(getattr(kind, need) for need in can)]
        raise ValueError(f"The method {method} does no {' or '.join(can)}, so not {site}; {', '.join(others)} do.")
    return method


@dataclass(frozen=True, init=False)
class ColumnPlan:
    """The methods at a column-parallel layer's three sites, and what it keeps for wgrad.

    `is_measured` says that tuning chose them, for reports; it changes nothing.
    """

    forward: Method = REPLICATED
    dgrad: Method = REPLICATED
    wgrad: Method = REPLICATED
    keeps: Keeps = "shard"
    is_measured: bool = field(default=False, compare=False, repr=False)

    def __init__(
        self,
        *,
        forward: Method | str = REPLICATED,
        dgrad: Method | str = REPLICATED,
        wgrad: Method | str = REPLICATED,
        keeps: Keeps = "shard",
        is_measured: bool = False,
    ) -> None:
        """Methods, or their names.

        Raises:
            ValueError: there is no such method, or it cannot do what its site needs.
        """
        _set(
            self,
            forward=_resolved(forward, "Column's forward", can=("gather",)),
            dgrad=_resolved(dgrad, "Column's dgrad", can=("scatter",)),
            wgrad=_resolved(wgrad, "Column's wgrad", can=("prefetch", "gather")),
            keeps=keeps,
            is_measured=is_measured,
        )


@dataclass(frozen=True, init=False)
class RowPlan:
    """The methods at a row-parallel layer's two sites, and how wgrad is computed; `is_measured` as above."""

    forward: Method = REPLICATED
    dgrad: Method = REPLICATED
    wgrad: Parts = "whole"
    is_measured: bool = field(default=False, compare=False, repr=False)

    def __init__(
        self,
        *,
        forward: Method | str = REPLICATED,
        dgrad: Method | str = REPLICATED,
        wgrad: Parts = "whole",
        is_measured: bool = False,
    ) -> None:
        """Methods, or their names.

        Raises:
            ValueError: there is no such method, or it cannot do what its site needs.
        """
        _set(
            self,
            forward=_resolved(forward, "Row's forward", can=("scatter",)),
            dgrad=_resolved(dgrad, "Row's dgrad", can=("gather",)),
            wgrad=wgrad,
            is_measured=is_measured,
        )


def _set(plan: ColumnPlan | RowPlan, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(plan, name, value)  # as a frozen dataclass's own __init__ does


def column_plan(config: ModelParallelConfig, *, disable_pipeline: bool = False) -> ColumnPlan:
    """The plan that the switches mean for a column-parallel layer.

    Args:
        config: the switches.
        disable_pipeline: this layer asks for no pipelines (the forward all-gather's and the dgrad's); bulk overlap
            is not touched.
    """
    if not config.sequence_parallel:
        return ColumnPlan()
    dgrad = _switched(config, "tp_comm_bulk_dgrad")
    if config.tp_comm_overlap_rs_dgrad and not disable_pipeline:
        dgrad = _switched(config, "tp_comm_overlap_rs_dgrad")
    return ColumnPlan(
        forward=SEQUENTIAL if disable_pipeline else _switched(config, "tp_comm_overlap_ag"),
        dgrad=dgrad,
        wgrad=_switched(config, "tp_comm_bulk_wgrad"),
        keeps="gathered" if config.tp_comm_keep_gathered else "shard",
    )


def row_plan(config: ModelParallelConfig) -> RowPlan:
    """The plan that the switches mean for a row-parallel layer."""
    if not config.sequence_parallel:
        return RowPlan()
    return RowPlan(forward=_switched(config, "tp_comm_overlap_rs"), dgrad=_switched(config, "tp_comm_overlap_ag"))


def _switched(config: ModelParallelConfig, switch: str) -> Method:
    is_on = config.tp_comm_overlap and getattr(config, switch)
    return registry.of_switch(switch) if is_on else SEQUENTIAL
