"""Which plans are checked: those that the switches mean, and every method that is registered."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

from shiplap.config.parallel import ModelParallelConfig
from shiplap.overlap import registry
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan
from shiplap.overlap.primitives import Method
from shiplap.overlap.registry import REPLICATED
from shiplap.overlap.registry import SEQUENTIAL as SEQUENTIAL_METHOD

_SUB_SWITCHES = (
    "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
)

_SEQUENTIAL_COLUMN = ColumnPlan(forward=SEQUENTIAL_METHOD, dgrad=SEQUENTIAL_METHOD, wgrad=SEQUENTIAL_METHOD)
_SEQUENTIAL_ROW = RowPlan(forward=SEQUENTIAL_METHOD, dgrad=SEQUENTIAL_METHOD)


def _other_column_plans() -> Iterator[ColumnPlan]:
    """Only a replaced `layer.plan` uses these: every method that there is, at every site that it can do."""
    sites = [_examples("gather"), _examples("scatter"), _examples("second gather")]
    for number, (forward, dgrad, wgrad) in enumerate(_beside_each_other(sites)):
        yield ColumnPlan(forward=forward, dgrad=dgrad, wgrad=wgrad, keeps="gathered" if number == 0 else "shard")


def _other_row_plans() -> Iterator[RowPlan]:
    """Likewise, with wgrad as a whole and in parts."""
    sites = [_examples("scatter"), _examples("gather")]
    for number, (forward, dgrad) in enumerate(_beside_each_other(sites)):
        yield RowPlan(forward=forward, dgrad=dgrad, wgrad="parts" if number % 2 else "whole")


def _examples(site: registry.Need) -> list[Method]:
    usual = (REPLICATED, SEQUENTIAL_METHOD)
    return [one for kind in registry.kinds() for one in registry.examples(site, kind) if one not in usual]


def _beside_each_other(sites: Sequence[Sequence[Method]]) -> Iterator[tuple[Method, ...]]:
    """As many tuples as the longest list has methods; the others begin again."""
    for number in range(max(map(len, sites))):
        yield tuple(methods[number % len(methods)] for methods in sites)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """How a column layer and a row layer overlap. A case may use one of the two only."""

    column: ColumnPlan
    row: RowPlan

    @property
    def sequence_parallel(self) -> bool:
        """Whether the sequence is sharded between layers; without, all methods of both layers are `REPLICATED`."""
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
        every += _other_column_plans()
    return {f"column {_methods(plan)}": Plans(column=plan, row=_row_beside(plan)) for plan in every}


def row_plans(num_ranks: int, *, quick: bool) -> dict[str, Plans]:
    """The distinct plans of a row layer, likewise."""
    every = [plans.row for plans in _all_plans(num_ranks, quick=quick)]
    if num_ranks > 1 and not quick:
        every += _other_row_plans()
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
    if plan in (ColumnPlan(), RowPlan()):
        return "no SP"
    values = {field: getattr(plan, field.name) for field in fields(plan)}
    sites = [str(value) for value in values.values() if isinstance(value, Method)]
    others = [field for field, value in values.items() if not isinstance(value, Method) and value != field.default]
    return "/".join(sites) + "".join(f", {field.name} {values[field]}" for field in others)
