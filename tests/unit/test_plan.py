"""The truth table of the switches: which overlap acts at which site of which layer."""

from collections.abc import Callable
from itertools import product

import pytest

from shiplap import ModelParallelConfig
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan

OFF = {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": False, "tp_comm_bulk_dgrad": False} | {
    "tp_comm_overlap_ag": False,
    "tp_comm_overlap_rs": False,
}


def config(**switches: bool) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, **switches)


@pytest.mark.parametrize(
    ("switches", "column", "row"),
    [
        ({}, ("sequential", "sequential", "sequential"), ("sequential", "sequential")),
        ({"tp_comm_overlap": True}, ("ring", "bulk", "bulk"), ("p2p", "ring")),
        (OFF, ("sequential", "sequential", "sequential"), ("sequential", "sequential")),
        (OFF | {"tp_comm_bulk_wgrad": True}, ("sequential", "sequential", "bulk"), ("sequential", "sequential")),
        (OFF | {"tp_comm_bulk_dgrad": True}, ("sequential", "bulk", "sequential"), ("sequential", "sequential")),
        (OFF | {"tp_comm_overlap_ag": True}, ("ring", "sequential", "sequential"), ("sequential", "ring")),
        (OFF | {"tp_comm_overlap_rs": True}, ("sequential", "sequential", "sequential"), ("p2p", "sequential")),
        (
            OFF | {"tp_comm_overlap_rs_dgrad": True},
            ("sequential", "p2p", "sequential"),
            ("sequential", "sequential"),
        ),
    ],
)
def test_each_switch_moves_its_own_sites(
    switches: dict[str, bool], column: tuple[str, str, str], row: tuple[str, str]
) -> None:
    plan = column_plan(config(**switches))
    assert tuple(map(str, (plan.forward, plan.dgrad, plan.wgrad))) == column
    row_sites = row_plan(config(**switches))
    assert tuple(map(str, (row_sites.forward, row_sites.dgrad))) == row


@pytest.mark.parametrize("values", list(product((False, True), repeat=6)))
def test_every_combination(values: tuple[bool, ...]) -> None:
    overlap, bulk_wgrad, bulk_dgrad, ag, rs, rs_dgrad = values
    asked = config(
        tp_comm_overlap=overlap,
        tp_comm_bulk_wgrad=bulk_wgrad,
        tp_comm_bulk_dgrad=bulk_dgrad,
        tp_comm_overlap_ag=ag,
        tp_comm_overlap_rs=rs,
        tp_comm_overlap_rs_dgrad=rs_dgrad,
    )
    for disable in (False, True):
        plan = column_plan(asked, disable_pipeline=disable)
        assert (str(plan.forward) == "ring") == (overlap and ag and not disable)
        assert (str(plan.wgrad) == "bulk") == (overlap and bulk_wgrad)
        assert (str(plan.dgrad) == "p2p") == (overlap and rs_dgrad and not disable)
        # The pipeline takes bulk's place where it acts; the disable flag gives the place back.
        assert (str(plan.dgrad) == "bulk") == (overlap and bulk_dgrad and str(plan.dgrad) != "p2p")
    assert (str(row_plan(asked).forward) == "p2p") == (overlap and rs)
    assert (str(row_plan(asked).dgrad) == "ring") == (overlap and ag)


def test_without_sequence_parallelism_nothing_is_gathered() -> None:
    for size in (1, 2):
        plain = ModelParallelConfig(tensor_parallel_size=size)
        assert column_plan(plain) == ColumnPlan(forward="replicated", dgrad="replicated", wgrad="replicated")
        assert row_plan(plain) == RowPlan(forward="replicated", dgrad="replicated")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColumnPlan(forward="bulk"), "The method bulk does no gather, so not Column's forward; replicated, "),
        (lambda: ColumnPlan(forward="rign"), "There is no overlap method rign; there is replicated, sequential, "),
        (lambda: ColumnPlan(dgrad="ring"), "The method ring does no scatter, so not Column's dgrad; "),
        (lambda: ColumnPlan(wgrad="reduce"), "The method reduce does no prefetch or gather, so not Column's wgrad; "),
        (lambda: RowPlan(forward="ring:2"), "The method ring:2 does no scatter, so not Row's forward; "),
        (lambda: RowPlan(dgrad="p2p"), "The method p2p does no gather, so not Row's dgrad; "),
    ],
)
def test_a_plan_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
