"""What is measured for each kind of layer: the truth table of the switches, and that it can all be run."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shiplap.config import ModelOptions, ModelParallelConfig, TrainConfig
from shiplap.config.lora import LoraOptions
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.overlap.by_shard import doubling
from shiplap.overlap.plan import ColumnPlan, Keeps, RowPlan, column_plan, row_plan
from shiplap.overlap.primitives import Method
from shiplap.overlap.registry import method
from shiplap.train.setup import resolve_structure
from shiplap.tuning.candidates import Pass, candidates, sequential_plan, with_fields
from shiplap.tuning.kinds import kinds_of
from shiplap.tuning.measured import describe

SMALL = ModelOptions(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
ALL_ON = {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True}
DIRECTIONS: tuple[Pass, Pass] = ("forward", "backward")
KEEPS: tuple[Keeps, Keeps] = ("shard", "gathered")
SEQUENTIAL = ["sequential"]
NOTHING = method("sequential")


def switches(size: int = 2, **asked: Any) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_parallel_size=size, sequence_parallel=True, **ALL_ON | asked)


def layers_of(parallel: ModelParallelConfig, family: str = "gpt2", lora: str | None = None) -> dict[str, ParallelLayer]:
    options = LoraOptions() if lora is None else LoraOptions(lora_rank=4, lora_target_modules=(lora,))
    config = TrainConfig(parallel=parallel, model=SMALL, lora=options)
    sizes, adapters = resolve_structure(family, config)
    model = skeleton(family, config, model=sizes, adapters=adapters)
    return {layer.path: layer for layer in parallel_layers(model)}


FC1, FC2, HEAD = "blocks.1.mlp.fc1", "blocks.1.mlp.fc2", "head.projection"
BY_COLUMNS = ["feature_chunks:8", "feature_chunks own_first"]
SCATTERS = ["p2p", "p2p:2", "p2p:4", "reduce", "row_chunks", "feature_chunks:3,2,2,1", *BY_COLUMNS]
PACED = ["feature_chunks:1,2,2,3 paced", "feature_chunks:8 paced"]
PAIRED = ["p2p", "row_chunks", "feature_chunks"]
"""Of Column's dgrad, whose end hides behind wgrad."""
GATHERS = ["ring", "ring:2", "ring:4", "feature_chunks:1,2,2,3", *BY_COLUMNS]
PARTS = [
    f"dgrad {way}, wgrad parts"
    for way in ("ring", "ring:2", "feature_chunks:1,2,2,3", "feature_chunks:8", "feature_chunks own_first")
]


@pytest.mark.parametrize(
    ("asked", "path", "direction", "names"),
    [
        ({}, FC1, "forward", [*SEQUENTIAL, *GATHERS]),
        ({"tp_comm_overlap_ag": False}, FC1, "forward", SEQUENTIAL),
        ({"tp_comm_overlap_disable_fc1": True}, FC1, "forward", SEQUENTIAL),
        ({"tp_comm_overlap_disable_qkv": True}, FC1, "forward", [*SEQUENTIAL, *GATHERS]),
        ({"tp_comm_overlap": False, "tp_comm_overlap_rs_dgrad": False}, FC1, "forward", SEQUENTIAL),
        ({}, FC2, "forward", [*SEQUENTIAL, *SCATTERS]),
        ({"tp_comm_overlap_rs": False}, FC2, "forward", SEQUENTIAL),
        # Another switch's pipeline.
        ({"tp_comm_overlap_rs_dgrad": False}, FC2, "forward", [*SEQUENTIAL, *SCATTERS]),
        ({}, FC2, "backward", [*SEQUENTIAL, *GATHERS, *PARTS]),
        ({"tp_comm_overlap_ag": False}, FC2, "backward", SEQUENTIAL),
        ({"tp_comm_overlap": False, "tp_comm_overlap_rs_dgrad": False}, FC2, "backward", SEQUENTIAL),
        # One site varies: its own method's name says it.
        (
            {"tp_comm_bulk_wgrad": False, "tp_comm_overlap_rs_dgrad": False},
            FC1,
            "backward",
            [*SEQUENTIAL, "bulk", "bulk_p2p"],
        ),
        (
            {"tp_comm_bulk_wgrad": False, "tp_comm_bulk_dgrad": False},
            FC1,
            "backward",
            [*SEQUENTIAL, *PAIRED],
        ),
        (
            {"tp_comm_bulk_dgrad": False, "tp_comm_overlap_rs_dgrad": False},
            FC1,
            "backward",
            [*SEQUENTIAL, "bulk", "bulk_p2p", "ring"],
        ),
        # Bulk overlap is not what a layer is denied.
        (
            {"tp_comm_overlap_disable_fc1": True, "tp_comm_bulk_wgrad": False},
            FC1,
            "backward",
            [*SEQUENTIAL, "bulk", "bulk_p2p"],
        ),
        ({"tp_comm_overlap": False, "tp_comm_overlap_rs_dgrad": False}, FC1, "backward", SEQUENTIAL),
    ],
)
def test_what_the_switches_let_be_measured(
    asked: dict[str, Any], path: str, *, direction: Pass, names: list[str]
) -> None:
    parallel = switches(**asked)
    assert list(candidates(layers_of(parallel)[path], direction, parallel)) == names


def test_a_column_layer_s_two_sites_are_chosen_together() -> None:
    parallel = switches(tp_comm_overlap_rs_dgrad=False)
    found = candidates(layers_of(parallel)[FC1], "backward", parallel)
    assert [(str(plan.dgrad), str(plan.wgrad)) for plan in found.values() if isinstance(plan, ColumnPlan)] == [
        # What the switches mean by default is among the first, as the last are left out where time is short.
        *((method, method) for method in ("sequential", "bulk", "bulk_p2p")),
        *((scatter, "bulk") for scatter in ("sequential", "bulk_p2p")),
        ("sequential", "bulk_p2p"),
        *((scatter, "ring") for scatter in ("sequential", "bulk_p2p")),
        *((scatter, "sequential") for scatter in ("bulk", "bulk_p2p")),
    ]
    assert list(found)[:3] == ["sequential", "dgrad bulk, wgrad bulk", "dgrad bulk_p2p, wgrad bulk_p2p"]


def test_what_the_switches_do_by_themselves_is_measured() -> None:
    for on in (False, True):
        parallel = switches(tp_comm_overlap_rs_dgrad=on)
        layer = layers_of(parallel)[FC1]
        found = candidates(layer, "backward", parallel).values()
        own = layer.module.plan
        assert isinstance(own, ColumnPlan)
        assert replace(own, forward=NOTHING) in found
        assert len(found) == (18 if on else 10)


def test_what_is_kept_is_not_gathered() -> None:
    parallel = switches()
    found = candidates(layers_of(parallel)[FC1], "backward", parallel, keeps="gathered")
    assert list(found) == ["sequential", "bulk", "bulk_p2p", *PAIRED]
    assert {(str(plan.wgrad), plan.keeps) for plan in found.values() if isinstance(plan, ColumnPlan)} == {
        ("sequential", "gathered")
    }


@pytest.mark.parametrize(
    ("lora", "path", "direction", "names"),
    [
        # Frozen: there is no wgrad to hide the scatter behind, and nothing to gather for it.
        ("blocks.0.mlp.fc1", FC1, "backward", [*SEQUENTIAL, *PAIRED]),
        # The adapter's wgrad is there, and keeps what it needs.
        ("blocks.1.mlp.fc1", FC1, "backward", [*SEQUENTIAL, "bulk", "bulk_p2p", *PAIRED]),
        ("blocks.0.mlp.fc1", FC2, "backward", [*SEQUENTIAL, *GATHERS]),
        ("blocks.1.mlp.fc2", FC2, "backward", [*SEQUENTIAL, *GATHERS, *PARTS]),
    ],
)
def test_what_frozen_weights_leave(lora: str, path: str, *, direction: Pass, names: list[str]) -> None:
    parallel = switches()
    assert list(candidates(layers_of(parallel, lora=lora)[path], direction, parallel)) == names


def test_without_dgrad_only_the_gather_is_hidden() -> None:
    """Behind wgrad itself: there is no dgrad that bulk could hide behind."""
    parallel = switches()
    first = replace(layers_of(parallel)[FC1], has_dgrad=False)
    assert list(candidates(first, "backward", parallel)) == ["sequential", "ring"]
    row = replace(layers_of(parallel)[FC2], has_dgrad=False)
    assert list(candidates(row, "backward", parallel)) == [*SEQUENTIAL, *PARTS]
    # With nothing to choose it still says what it does.
    nothing = replace(first, has_wgrad=False)
    assert candidates(nothing, "backward", parallel) == {"sequential": sequential_plan(nothing)}


@pytest.mark.parametrize(
    ("size", "gathers"),
    [
        (3, ["ring", "shards_per_gemm", "shards_per_gemm:1,2", "feature_chunks:1,2,2,3", *BY_COLUMNS]),
        (4, ["ring", "shards_per_gemm", "shards_per_gemm:1,3", "feature_chunks:1,2,2,3", *BY_COLUMNS]),
        (8, ["ring", "shards_per_gemm", "shards_per_gemm:1,7", "feature_chunks:1,2,2,3", *BY_COLUMNS]),
    ],
)
def test_more_ranks_can_take_several_shards_at_once(size: int, gathers: list[str]) -> None:
    layers = layers_of(switches())
    gathers = [*gathers, *PACED]
    assert list(candidates(layers[FC1], "forward", switches(size))) == [*SEQUENTIAL, *gathers]
    ways = ("ring", "shards_per_gemm", "feature_chunks:1,2,2,3", "feature_chunks:8", "feature_chunks own_first", *PACED)
    parts = [f"dgrad {way}, wgrad parts" for way in ways]
    assert list(candidates(layers[FC2], "backward", switches(size))) == [*SEQUENTIAL, *gathers, *parts]


def test_pacing_is_measured_where_transfers_can_meet() -> None:
    layers = layers_of(switches())
    for path, direction in product((FC1, FC2), DIRECTIONS):
        two, four = (list(candidates(layers[path], direction, switches(size))) for size in (2, 4))
        assert not [name for name in two if "paced" in name]
        assert [name for name in four if "paced" in name]
        nccl = list(candidates(layers[path], direction, switches(4), with_pacing=False))
        assert nccl == [name for name in four if "paced" not in name]
    backward = candidates(layers[FC1], "backward", switches(4))
    both = [plan for name, plan in backward.items() if name.count("paced") == 2]
    assert [(str(plan.dgrad), str(plan.wgrad)) for plan in both if isinstance(plan, ColumnPlan)] == [
        ("bulk_p2p paced", "bulk_p2p paced"),
        ("feature_chunks paced", "bulk_p2p paced"),
    ]


def every_case() -> Iterator[tuple[ParallelLayer, Pass, ModelParallelConfig, Keeps]]:
    """All kinds of layers of several models under all switches."""
    names = ("overlap", "bulk_wgrad", "bulk_dgrad", "overlap_ag", "overlap_rs", "overlap_rs_dgrad")
    for size in (2, 4):
        models = [("gpt2", None), ("gpt2", "blocks.1.mlp.fc1"), ("gpt2", "blocks.0.mlp.fc2"), ("mixtral", None)]
        kinds = []
        for (family, lora), disabled in product(models, (False, True)):
            base = switches(size, tp_comm_overlap_disable_fc1=disabled)
            kinds += [kind for kind in kinds_of(layers_of(base, family, lora).values()) if kind not in kinds]
        for values in product((False, True), repeat=len(names)):
            parallel = switches(size, **{f"tp_comm_{name}": on for name, on in zip(names, values, strict=True)})
            for kind, keeps in product(kinds, KEEPS):
                for direction in kind.directions:
                    yield kind.layer, direction, parallel, keeps


def check_method(asked: Method, size: int) -> None:
    """Its name means it, and its numbers fit. That it can do what its site needs is the plan's own check."""
    assert method(str(asked)) == asked
    assert not asked.paced or size > 2, asked
    if asked.kind.name == "shards_per_gemm":
        assert sum(asked.pieces or doubling(size)) == size, asked
    assert all(number > 0 for number in asked.pieces), asked


def test_every_candidate_can_be_run_and_nothing_is_measured_that_is_off() -> None:
    num_plans = 0
    for layer, direction, parallel, keeps in every_case():
        found = candidates(layer, direction, parallel, keeps=keeps)
        first, *others = found.values()
        assert (next(iter(found)), first) == ("sequential", sequential_plan(layer, keeps=keeps))
        assert len(set(found.values())) == len(found), "the same is measured twice"
        for plan in (first, *others):
            num_plans += 1
            sites = ("forward",) if direction == "forward" else ("dgrad", "wgrad")
            nothing = {site: "sequential" for site in sites if hasattr(plan, site)}
            nothing |= {"wgrad": "whole"} if isinstance(plan, RowPlan) else {}
            assert with_fields(plan, nothing) == first
            if isinstance(plan, ColumnPlan):
                check_column(plan, layer, parallel)
                assert plan.keeps == keeps
            else:
                check_row(plan, parallel)
    assert num_plans > 10_000


def check_column(plan: ColumnPlan, layer: ParallelLayer, parallel: ModelParallelConfig) -> None:
    size, on = parallel.tensor_parallel_size, parallel.tp_comm_overlap
    for site in (plan.forward, plan.dgrad, plan.wgrad):
        check_method(site, size)
    may_pipeline = on and not getattr(layer.module, "disable_tp_comm_pipeline", False)
    assert plan.forward == NOTHING or (may_pipeline and parallel.tp_comm_overlap_ag)
    if plan.dgrad.kind.name in ("bulk", "bulk_p2p"):
        assert on
        assert parallel.tp_comm_bulk_dgrad
        assert layer.has_wgrad, "nothing to hide behind"
    elif plan.dgrad != NOTHING:
        assert may_pipeline
        assert parallel.tp_comm_overlap_rs_dgrad
    if plan.wgrad != NOTHING:
        assert on
        assert parallel.tp_comm_bulk_wgrad
        assert layer.gathers_again
        assert plan.keeps == "shard"
    assert plan.wgrad.kind.name not in ("bulk", "bulk_p2p") or layer.has_dgrad, "nothing to hide behind"


def check_row(plan: RowPlan, parallel: ModelParallelConfig) -> None:
    size, on = parallel.tensor_parallel_size, parallel.tp_comm_overlap
    for site in (plan.forward, plan.dgrad):
        check_method(site, size)
    assert plan.forward == NOTHING or (on and parallel.tp_comm_overlap_rs)
    assert plan.dgrad == NOTHING or (on and parallel.tp_comm_overlap_ag)


def test_what_the_switches_themselves_do_is_always_measured() -> None:
    """So that a measured plan is at least as good. Bulk is not where it has nothing to hide behind."""
    for layer, direction, parallel, keeps in every_case():
        if keeps == "gathered" or (direction == "backward" and not (layer.has_dgrad and layer.has_wgrad)):
            continue
        disabled = bool(getattr(layer.module, "disable_tp_comm_pipeline", False))
        sites = ("forward",) if direction == "forward" else ("dgrad", "wgrad")
        own = column_plan(parallel, disable_pipeline=disabled) if layer.kind == "column" else row_plan(parallel)
        asked = {site: getattr(own, site) for site in sites if hasattr(own, site)}
        if not layer.gathers_again:
            asked.pop("wgrad", None)
        ways = candidates(layer, direction, parallel).values()
        assert any(all(getattr(way, site) == method for site, method in asked.items()) for way in ways), asked


def test_layers_that_are_equally_fast_are_measured_once() -> None:
    kinds = kinds_of(layers_of(switches()).values())
    assert [kind.paths for kind in kinds] == [
        *([f"blocks.{number}.{name}" for number in (0, 1)] for name in ("attention.qkv", "attention.proj")),
        *([f"blocks.{number}.mlp.{name}" for number in (0, 1)] for name in ("fc1", "fc2")),
        ["head.projection"],
    ]


@pytest.mark.parametrize(
    ("family", "lora", "other"),
    [
        ("gpt2", None, {"tp_comm_overlap_disable_fc1": True}),
        ("gpt2", "blocks.1.mlp.fc1", {}),
        ("gpt2", "blocks.0.mlp.fc2", {}),
        ("mixtral", None, {}),
    ],
)
def test_layers_that_differ_are_of_different_kinds(family: str, lora: str | None, other: dict[str, Any]) -> None:
    plain = describe(layers_of(switches())[FC1])
    assert describe(layers_of(switches(**other), family, lora)[FC1]) != plain


def test_a_kind_does_not_depend_on_the_number_of_ranks_or_the_rank() -> None:
    """Sizes are those of the whole layer, a tied head's too."""
    two, four = (layers_of(switches(size)) for size in (2, 4))
    for path in (FC1, FC2):
        assert describe(two[path]) == describe(four[path])
    config = TrainConfig(parallel=switches(), model=SMALL)
    sizes, adapters = resolve_structure("gpt2", config)
    bones = [skeleton("gpt2", config, model=sizes, adapters=adapters, rank=rank) for rank in (0, 1)]
    first, second = ([describe(layer) for layer in parallel_layers(model)] for model in bones)
    assert first == second
    assert first[-1]["out_features"] >= sizes.vocab_size
