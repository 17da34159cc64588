"""Which plans are checked: as data, so that a new method is one line here."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product

from shiplap.config.parallel import ModelParallelConfig
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan

_SUB_SWITCHES = (
    "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
)

_SEQUENTIAL_COLUMN = ColumnPlan(forward="sequential", dgrad="sequential", wgrad="sequential")
_SEQUENTIAL_ROW = RowPlan(forward="sequential", dgrad="sequential")

# What no switch chooses, and only a replaced `layer.plan` uses. In the names of the table a method's numbers follow it.
_OTHER_COLUMN_PLANS = (
    ColumnPlan(forward="sequential", dgrad="reduce", wgrad="sequential"),
    ColumnPlan(forward="grouped", dgrad="bulk", wgrad="bulk"),
    ColumnPlan(forward="ring:2", dgrad="exchange:2", wgrad="ring"),
    ColumnPlan(forward="ring", dgrad="pieces", wgrad="bulk"),
    ColumnPlan(forward="columns", dgrad="columns", wgrad="columns"),
    ColumnPlan(forward="tiles", dgrad="tiles", wgrad="tiles"),
    ColumnPlan(forward="ring", dgrad="direct", wgrad="direct"),
    ColumnPlan(forward="ring", dgrad="exchange", wgrad="bulk", keeps="gathered"),
    ColumnPlan(forward="columns in turns", dgrad="columns in turns", wgrad="direct in turns"),
    ColumnPlan(forward="grouped in turns", dgrad="direct in turns", wgrad="ring in turns"),
)
_OTHER_ROW_PLANS = (
    RowPlan(forward="reduce", dgrad="sequential"),
    RowPlan(forward="exchange:2", dgrad="ring:2"),
    RowPlan(forward="pieces", dgrad="ring"),
    RowPlan(forward="columns", dgrad="columns", wgrad="parts"),
    RowPlan(forward="tiles", dgrad="tiles", wgrad="parts"),
    RowPlan(forward="exchange", dgrad="grouped"),
    RowPlan(forward="exchange", dgrad="ring", wgrad="parts"),
    RowPlan(forward="exchange in turns", dgrad="columns in turns", wgrad="parts"),
    RowPlan(forward="tiles in turns", dgrad="tiles in turns"),
)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """How a column layer and a row layer overlap. A case may use one of the two only."""

    column: ColumnPlan
    row: RowPlan

    @property
    def sequence_parallel(self) -> bool:
        """Whether the sequence is sharded between layers; without, both layers' methods are all `replicated`."""
        return self.column != ColumnPlan()


NO_SEQUENCE_PARALLEL = Plans(column=ColumnPlan(), row=RowPlan())
SEQUENTIAL = Plans(column=_SEQUENTIAL_COLUMN, row=_SEQUENTIAL_ROW)
"""The reference: what the others may be bit-identical to."""


def pairs(num_ranks: int) -> Iterator[tuple[str, Plans]]:
    """What both layers do together, by name: without sequence parallelism, then from nothing on to everything on."""
    yield "no SP", NO_SEQUENCE_PARALLEL
    if num_ranks > 1:
        yield "SP, sequential", SEQUENTIAL
        yield "SP, default overlap", _plans(num_ranks)
        yield "SP, all overlap", _plans(num_ranks, **dict.fromkeys(_SUB_SWITCHES, True))


def column_plans(num_ranks: int, *, quick: bool) -> dict[str, Plans]:
    """The distinct plans of a column layer, `sequential` before those that overlap; by the methods of its sites."""
    every = [plans.column for plans in _all_plans(num_ranks, quick=quick)]
    if num_ranks > 1 and not quick:
        every += _OTHER_COLUMN_PLANS
    return {f"column {_methods(plan)}": Plans(column=plan, row=_row_beside(plan)) for plan in every}


def row_plans(num_ranks: int, *, quick: bool) -> dict[str, Plans]:
    """The distinct plans of a row layer, likewise."""
    every = [plans.row for plans in _all_plans(num_ranks, quick=quick)]
    if num_ranks > 1 and not quick:
        every += _OTHER_ROW_PLANS
    return {f"row {_methods(plan)}": Plans(column=_column_beside(plan), row=plan) for plan in every}


def _all_plans(num_ranks: int, *, quick: bool) -> Iterator[Plans]:
    """Of the switches, distinct or not."""
    yield from (plans for _, plans in pairs(num_ranks))
    if num_ranks > 1 and not quick:
        for values in product((False, True), repeat=len(_SUB_SWITCHES)):
            yield _plans(num_ranks, **dict(zip(_SUB_SWITCHES, values, strict=True)))


def _plans(num_ranks: int, **switches: bool) -> Plans:
    config = ModelParallelConfig(
        tensor_parallel_size=num_ranks, sequence_parallel=True, tp_comm_overlap=True, **switches
    )
    return Plans(column=column_plan(config), row=row_plan(config))


# A case of one layer is told by that layer's plan; the other one only has to agree on sequence parallelism.
def _row_beside(plan: ColumnPlan) -> RowPlan:
    return RowPlan() if plan == ColumnPlan() else _SEQUENTIAL_ROW


def _column_beside(plan: RowPlan) -> ColumnPlan:
    return ColumnPlan() if plan == RowPlan() else _SEQUENTIAL_COLUMN


def _methods(plan: ColumnPlan | RowPlan) -> str:
    """The methods of the plan's sites, and whatever else it says that is not the default."""
    sites = [getattr(plan, field.name) for field in fields(plan) if field.default == "replicated"]
    if set(sites) == {"replicated"}:
        return "no SP"
    others = [field for field in fields(plan) if field.default != "replicated"]
    changed = [f", {f.name} {getattr(plan, f.name)}" for f in others if getattr(plan, f.name) != f.default]
    return "/".join(sites) + "".join(changed)
