"""The truth table of the switches: which overlap acts at which site of which layer."""

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
        ({"tp_comm_overlap": True}, ("ring", "bulk", "bulk"), ("exchange", "ring")),
        (OFF, ("sequential", "sequential", "sequential"), ("sequential", "sequential")),
        (OFF | {"tp_comm_bulk_wgrad": True}, ("sequential", "sequential", "bulk"), ("sequential", "sequential")),
        (OFF | {"tp_comm_bulk_dgrad": True}, ("sequential", "bulk", "sequential"), ("sequential", "sequential")),
        (OFF | {"tp_comm_overlap_ag": True}, ("ring", "sequential", "sequential"), ("sequential", "ring")),
        (OFF | {"tp_comm_overlap_rs": True}, ("sequential", "sequential", "sequential"), ("exchange", "sequential")),
        (
            OFF | {"tp_comm_overlap_rs_dgrad": True},
            ("sequential", "exchange", "sequential"),
            ("sequential", "sequential"),
        ),
    ],
)
def test_each_switch_moves_its_own_sites(
    switches: dict[str, bool], column: tuple[str, str, str], row: tuple[str, str]
) -> None:
    plan = column_plan(config(**switches))
    assert (plan.forward, plan.dgrad, plan.wgrad) == column
    row_sites = row_plan(config(**switches))
    assert (row_sites.forward, row_sites.dgrad) == row


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
        assert (plan.forward == "ring") == (overlap and ag and not disable)
        assert (plan.wgrad == "bulk") == (overlap and bulk_wgrad)
        assert (plan.dgrad == "exchange") == (overlap and rs_dgrad and not disable)
        # The pipeline takes bulk's place where it acts; the disable flag gives the place back.
        assert (plan.dgrad == "bulk") == (overlap and bulk_dgrad and plan.dgrad != "exchange")
    assert (row_plan(asked).forward == "exchange") == (overlap and rs)
    assert (row_plan(asked).dgrad == "ring") == (overlap and ag)


def test_without_sequence_parallelism_nothing_is_gathered() -> None:
    for size in (1, 2):
        plain = ModelParallelConfig(tensor_parallel_size=size)
        assert column_plan(plain) == ColumnPlan(forward="replicated", dgrad="replicated", wgrad="replicated")
        assert row_plan(plain) == RowPlan(forward="replicated", dgrad="replicated")
