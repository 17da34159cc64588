"""Measured plans for a run: what layers are given, and plans that are for another run or say what cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiplap.config import DataOptions, RunOptions, TrainConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.dist.axes import layout_for
from shiplap.inspection.layers import parallel_layers
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.tensor_parallel.linear import ColumnParallelLinear
from shiplap.tuning.plan_file import write_plan
from shiplap.tuning.run import conditions_of, note
from tests.cases.measured import SMALL, damage, drop, loaded, model_of, plan_of, put, run_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(plan_of(run_of()), path)
    return path


def test_every_layer_is_given_what_was_measured_of_its_kind(file: Path) -> None:
    config = run_of()
    model = model_of(config)
    loaded(file, config).apply(model)
    column = ColumnPlan(forward="ring:2", dgrad="bulk_p2p", wgrad="ring")
    row = RowPlan(forward="row_chunks", dgrad="sequential")
    layers = list(parallel_layers(model))
    assert len(layers) == 9
    for layer in layers:
        assert layer.module.plan == (column if layer.kind == "column" else row)
        assert layer.module.plan.is_measured


def test_it_needs_nothing_of_the_device_that_it_is_for(file: Path) -> None:
    """What `explain` says of a GPU's plan, it says where there is none; who starts workers leaves GPUs to them."""
    damage(file, lambda content: content["conditions"].update(device="cuda", hardware="Imaginary GPU"))
    config = replace(run_of(), run=RunOptions(device="cuda"))
    assert loaded(file, config).conditions.hardware == "Imaginary GPU"


FOR_ANOTHER: list[tuple[TrainConfig, list[str]]] = [
    (run_of(size=4), ["--tensor-parallel 2", "this run has 4"]),
    (run_of(data=DataOptions(batch_size=3, sequence_length=17)), ["--sequence-length of 16", "this run has 18"]),
    (run_of(data=DataOptions(batch_size=4, sequence_length=15)), ["--batch-size 3", "this run has 4"]),
    (replace(run_of(), run=RunOptions(dtype="bfloat16")), ["--dtype float32", "this run has bfloat16"]),
    (replace(run_of(), run=RunOptions(device="cuda")), ["--device cpu", "this run has cuda"]),
    (
        run_of(model=replace(SMALL, ffn_hidden_size=128)),
        ["nothing about layers like blocks.0.mlp.fc1", "out_features 128", "in_features 32"],
    ),
    (
        run_of(lora=LoraOptions(lora_rank=4, lora_target_modules=("fc2",))),
        ["nothing about layers like blocks.0.attention.qkv", "gradients []"],
    ),
    (
        run_of(tp_comm_overlap_disable_fc1=True),
        ["nothing about layers like blocks.0.mlp.fc1", "is_denied_pipelines True"],
    ),
    (run_of(tp_comm_overlap_ag=False), ["forward ring:2 for the forward pass of blocks.0.attention.qkv"]),
    (run_of(tp_comm_overlap_rs=False), ["forward row_chunks for the forward pass of blocks.0.attention.proj"]),
    (run_of(tp_comm_bulk_dgrad=False), ["dgrad bulk_p2p, wgrad ring for the backward pass of blocks.0.attention.q"]),
    (run_of(tp_comm_bulk_wgrad=False), ["dgrad bulk_p2p, wgrad ring for the backward pass of blocks.0.attention.q"]),
    (run_of(tp_comm_keep_gathered=True), ["the shard of the input at blocks.0.attention.qkv", "keep-gathered"]),
]


@pytest.mark.parametrize(("config", "named"), FOR_ANOTHER, ids=[named[0] for _, named in FOR_ANOTHER])
def test_a_plan_for_another_run_is_refused(file: Path, config: TrainConfig, *, named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        loaded(file, config)
    message = str(refused.value)
    assert message.startswith(f"--tp-comm-plan {file} ")
    for part in (*named, "tune"):
        assert part in message, message


def test_a_padded_sequence_is_the_same_as_one_that_needs_no_padding(file: Path) -> None:
    loaded(file, run_of(data=DataOptions(batch_size=3, sequence_length=16)))


def test_a_switch_that_changes_nothing_of_the_plan_does_not_matter(file: Path) -> None:
    """Names of candidates differ between the two, as with all switches more sites vary."""
    loaded(file, run_of(tp_comm_overlap_rs_dgrad=True))
    damage(file, lambda content: [put("fields", "dgrad", value="sequential")(one) for one in backward(content)])
    for bulk_dgrad in (True, False):
        loaded(file, run_of(tp_comm_bulk_dgrad=bulk_dgrad))


def backward(content: Any) -> list[Any]:
    """What a column layer's backward passes are in a file."""
    return [one for one in content["passes"] if one["direction"] == "backward" and "wgrad" in one["fields"]]


@pytest.mark.parametrize(
    ("number", "site", "method"),
    [
        (0, "forward", "ring:2,2"),
        (0, "forward", "replicated"),
        (0, "forward", "shards_per_gemm:1,1,1"),
        (1, "wgrad", "feature_chunks"),
        (1, "wgrad", "replicated"),
        (2, "forward", "bulk"),
    ],
)
def test_methods_that_are_not_measured_are_refused_before_anything_starts(
    file: Path, number: int, *, site: str, method: str
) -> None:
    """Not in the first step, by some rank; even where what the file calls the method is one that there is."""
    damage(file, put("passes", number, "fields", site, value=method))
    with pytest.raises(UserError) as refused:
        loaded(file, run_of(tp_comm_overlap_rs_dgrad=True))
    message = str(refused.value)
    assert message.startswith(f"--tp-comm-plan {file} says ")
    assert f"{site} {method}" in message
    assert "no method that `shiplap tune` measures there with --tensor-parallel 2" in message


@pytest.mark.parametrize(
    ("number", "site", "method"),
    [
        (0, "forward", "rign:2"),
        (0, "forward", ""),
        (0, "forward", "ring:x"),
        (0, "forward", "ring:"),
        (0, "forward", "ring:0"),
        (0, "forward", "ring:-2"),
        (0, "forward", "bulk"),
        (0, "forward", "p2p"),
        (0, "forward", "sequential:2"),
        (0, "forward", "feature_chunks:0"),
        (1, "dgrad", "ring"),
        (1, "dgrad", "bulk:2"),
        (1, "dgrad", "row_chunks:0"),
        (1, "wgrad", "p2p"),
        (2, "forward", "row_chunks:"),
        (3, "dgrad", "bulk"),
    ],
)
def test_methods_that_cannot_be_are_refused_where_the_file_is_read(
    file: Path, number: int, *, site: str, method: str
) -> None:
    damage(file, put("passes", number, "fields", site, value=method))
    with pytest.raises(UserError, match=rf"plan\.json: passes {number}: fields: .*method {method.partition(':')[0]}"):
        loaded(file, run_of(tp_comm_overlap_rs_dgrad=True))


@pytest.mark.parametrize("method", ["shards_per_gemm:1,1", "shards_per_gemm:1,1,1,1,1", "shards_per_gemm:4,0"])
def test_groups_that_do_not_make_the_ranks_are_refused(tmp_path: Path, method: str) -> None:
    path, config = tmp_path / "plan.json", run_of(size=4)
    write_plan(plan_of(config), path)
    columns = [number for number, one in enumerate(plan_of(config).passes) if one.fields.get("forward") == "ring:2"]
    for number in columns:
        damage(path, put("passes", number, "fields", "forward", value="shards_per_gemm:1,3"))
    loaded(path, config)
    damage(path, put("passes", 0, "fields", "forward", value=method))
    with pytest.raises(UserError, match=f"forward {method} for the forward pass .* with --tensor-parallel 4"):
        loaded(path, config)


def test_a_pass_that_was_not_measured_is_missed(file: Path) -> None:
    damage(file, drop("passes", 3))
    with pytest.raises(UserError, match=r"nothing about layers like blocks\.0\.attention\.proj: kind row"):
        loaded(file, run_of())


def test_more_than_is_needed_does_no_harm(file: Path) -> None:
    """A plan of all layers serves a model that has some of them; what it says of others is not looked at."""
    extra = {"kind": "column", "out_features": 7}

    def add(content: Any) -> None:
        content["passes"].append(content["passes"][0] | {"layer": extra})

    damage(file, add)
    plan = loaded(file, run_of())
    assert len(plan.passes) == 11


def test_a_kept_input_is_the_plan_s_to_choose(file: Path) -> None:
    damage(
        file,
        lambda content: [one["fields"].update(wgrad="sequential", keeps="gathered") for one in backward(content)],
    )
    for config in (run_of(), run_of(tp_comm_keep_gathered=True), run_of(tp_comm_bulk_wgrad=False)):
        model = model_of(config)
        loaded(file, config).apply(model)
        columns = [layer for layer in model.modules() if isinstance(layer, ColumnParallelLinear)]
        assert {layer.plan.keeps for layer in columns} == {"gathered"}
    # It is not gathered again, so there is nothing to overlap.
    damage(file, put("passes", 1, "fields", "wgrad", value="bulk"))
    with pytest.raises(UserError, match="dgrad bulk_p2p, wgrad bulk for the backward pass"):
        loaded(file, run_of())


def test_other_hardware_and_versions_are_said_and_accepted(file: Path) -> None:
    config = run_of()
    damage(
        file,
        lambda content: content["conditions"].update(
            hardware="Imaginary CPU", ranks_per_host=8, threads=77, pytorch="2.0.0", shiplap="0.0.1", data_parallel=3
        ),
    )
    plan = loaded(file, config)
    here = conditions_of(config, layout_for(config.parallel, 2))
    assert plan.differences(here) == [
        "data_parallel 3 then, 1 now",
        f"hardware Imaginary CPU then, {here.hardware} now",
        "ranks_per_host 8 then, 1 now",
        f"threads 77 then, {here.threads} now",
        f"pytorch 2.0.0 then, {here.pytorch} now",
        f"shiplap 0.0.1 then, {here.shiplap} now",
    ]
    text = note(plan, here)
    assert f"plan: --tp-comm-plan {file}, measured 2025-01-02" in text
    assert f"threads 77 then, {here.threads} now" in text
    assert "not clear, so without overlap: blocks.0.attention.qkv" in text
    clear = replace(plan, conditions=here, passes=[replace(one, is_clear=True) for one in plan.passes])
    assert note(clear, here) == f"plan: --tp-comm-plan {file}, measured 2025-01-02T03:04:05+00:00"
