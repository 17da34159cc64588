"""What `shiplap bench` makes of what it measured, and what it refuses. No ranks here, and no clock."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from shiplap.commands.main import main
from shiplap.config import DataOptions, ModelOptions, ModelParallelConfig, TrainConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.models.decoder import DecoderModel
from shiplap.tools.bench.figure import draw
from shiplap.tools.bench.layers import fields_of, layer_kinds, message_bytes, ways_of
from shiplap.tools.bench.options import BenchOptions
from shiplap.tools.bench.parts import block_kinds
from shiplap.tools.bench.peers import PEERS
from shiplap.tools.bench.result import Result
from shiplap.tools.bench.subject import Subject, measure
from shiplap.tools.bench.table import tables
from shiplap.train.setup import resolve_structure
from shiplap.tuning.probe import Workload

OVERLAP = ModelParallelConfig(
    tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True, tp_comm_overlap_rs_dgrad=True
)
SMALL = ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
ALONE = "communication: sequential"


def run_of(lora: LoraOptions | None = None, parallel: ModelParallelConfig = OVERLAP) -> TrainConfig:
    data = DataOptions(batch_size=3, sequence_length=15)
    return TrainConfig(parallel=parallel, model=SMALL, data=data, lora=lora or LoraOptions())


def model_of(config: TrainConfig) -> DecoderModel:
    sizes, adapters = resolve_structure("gpt2", config)
    return skeleton("gpt2", config, model=sizes, adapters=adapters)


def subject_of(variants: dict[str, Callable[[], float]], **more: Any) -> Subject:
    asked: dict[str, Any] = {
        "what": "layer",
        "name": "blocks.*.mlp.fc1",
        "count": 2,
        "direction": "forward",
        "message_bytes_per_rank": 1024,
        "communication": [name for name in variants if name.startswith("communication")],
        "candidates": [name for name in variants if name in ("sequential", "ring", "ring:2", "ring:4")],
        "chosen": {"switches": "ring"},
    }
    return Subject(variants=variants, **asked | more)


def result_of(samples: dict[str, list[float]], **more: Any) -> Result:
    return Result(subject=subject_of(dict.fromkeys(samples, float), **more), samples=samples)


def steady(rounds: int = 6, **milliseconds: float) -> dict[str, list[float]]:
    """Rounds on a machine that is twice as slow in every other one."""
    names = {"communication": ALONE, "ring_2": "ring:2", "plan": "measured plan", "all": "fastest methods"}
    return {names.get(n, n): [ms * (1 + number % 2) for number in range(rounds)] for n, ms in milliseconds.items()}


def test_the_bound_is_all_hidden_and_no_overlap_is_none() -> None:
    samples = steady(7, products=6.0, communication=4.0, sequential=10.0, ring=8.0, ring_2=6.0)
    result = result_of(samples)
    assert result.bound == pytest.approx(0.6)
    assert result.speedup("ring") == pytest.approx(1.25)
    assert result.relative("ring") == pytest.approx((0.8, 0.8, 0.8))
    assert [result.hidden(name) for name in ("sequential", "ring", "ring:2")] == pytest.approx([0, 0.5, 1])
    assert result.fastest == "ring:2"


def test_noise_hides_nothing() -> None:
    """The bound is far above in one round of six."""
    samples = {"products": [6.0] * 6, ALONE: [1.0] * 5 + [24.0], "sequential": [10.0] * 6, "ring": [8.0] * 6}
    assert result_of(samples).hidden("ring") is None
    assert result_of(samples | {ALONE: [1.0] * 6}).hidden("ring") == 0.5


def test_nothing_to_hide_has_no_fraction() -> None:
    result = result_of({"products": [9.9] * 6, ALONE: [0.1] * 6, "sequential": [10.0] * 6, "ring": [10.4] * 6})
    assert result.hidden("ring") is None
    assert result.fastest == "sequential"
    assert [record["hidden_fraction"] for record in result.records()] == [None] * 4


def test_the_smallest_communication_is_the_bound() -> None:
    samples = {"products": [2.0] * 6, ALONE: [8.0] * 6, "communication: ring": [6.0] * 5, "sequential": [10.0] * 6}
    result = result_of(samples, chosen={"switches": "sequential"})
    assert result.communication == "communication: ring"
    assert result.bound == pytest.approx(0.6)


def test_all_take_their_turns_and_the_slow_drop_out() -> None:
    calls: list[str] = []
    times = {"products": 1.0, ALONE: 2.0, "communication: ring": 9.0, "sequential": 5.0, "ring": 30.0, "ring:2": 4.0}

    def variant(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return times[name]

        return run

    subject = subject_of({name: variant(name) for name in times})
    samples = measure(subject, 7)
    assert calls[:6] == list(times)
    assert calls[6] == "communication: sequential"
    # The switches' own plan is measured to the end, however slow.
    assert {name: len(values) for name, values in samples.items()} == {
        "products": 7, ALONE: 7, "communication: ring": 6, "sequential": 7, "ring": 7, "ring:2": 7,
    }  # fmt: skip
    times["ring:4"] = 20.0
    assert len(measure(subject_of({name: variant(name) for name in times}), 7)["ring:4"]) == 2


def test_records_say_what_each_variant_is() -> None:
    samples = steady(products=6.0, communication=4.0, sequential=10.0, ring=8.0, DTensor=9.0)
    chosen = {"switches": "ring", "measured plan": "ring"}
    result = result_of(samples, chosen=chosen, peers=["DTensor"], why_not={"Other": "needs CUDA"})
    records = {record["variant"]: record for record in result.records()}
    assert {name: record["roles"] for name, record in records.items()} == {
        "products": ["products"],
        ALONE: ["communication"],
        "sequential": ["sequential", "candidate"],
        "ring": ["candidate", "switches", "measured plan"],
        "DTensor": ["peer"],
        "Other": ["peer"],
    }
    assert records["Other"]["why_not"] == "needs CUDA"
    ring = records["ring"]
    assert (ring["median_ms"], ring["quartile_low_ms"], ring["quartile_high_ms"]) == (12.0, 8.0, 16.0)
    assert (ring["name"], ring["pass"], ring["method"], ring["rounds"]) == ("blocks.*.mlp.fc1", "forward", "ring", 6)
    assert ring["message_bytes_per_rank"] == 1024
    json.dumps(list(records.values()))


@pytest.fixture
def many() -> list[Result]:
    """Five kinds of layers and three parts, with long names, large numbers and everything that there can be."""
    results = []
    times = {"products": 1234.5, ALONE: 987.6, "sequential": 2345.6, "ring": 1890.1, "ring_2": 1789.2, "plan": 1700.4}
    samples = {name: [value] * 6 for name, [value] in steady(
        rounds=1, **{"communication" if name == ALONE else name: value for name, value in times.items()}
    ).items()}  # fmt: skip
    for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "another.layer"):
        for direction in ("forward", "backward"):
            chosen = {"switches": "ring", "measured plan": "measured plan"}
            methods = {"measured plan": "dgrad feature_chunks:8, wgrad bulk_p2p"}
            more = {"name": f"blocks.*.{name}", "count": 126, "direction": direction}
            results.append(result_of(samples, chosen=chosen, methods=methods, **more))
    for name in ("attention", "experts", "block"):
        part = {n: v for n, v in samples.items() if n != "ring:2"} | {"fastest methods": [1500.0] * 6}
        part |= {"DTensor": [2000.0] * 6} if name == "attention" else {}
        results.append(
            result_of(
                part,
                what="part",
                name=name,
                count=126,
                direction="forward+backward",
                candidates=["sequential"],
                chosen={"switches": "ring", "measured plan": "measured plan", "fastest methods": "fastest methods"},
                peers=["DTensor"] if name == "attention" else [],
                why_not={} if name == "attention" else {"DTensor": "has no simple counterpart of experts"},
            )
        )
    return results


@pytest.mark.parametrize("has_plan", [True, False])
def test_tables_fit(many: list[Result], has_plan: bool) -> None:
    if not has_plan:
        for result in many:
            result.subject.chosen.pop("measured plan")  # type: ignore[attr-defined]
    text = tables(many)
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("DTensor: has no simple counterpart of experts") == 2
    assert text.count("blocks.*.") == 5
    assert ("feature_chunks:8/bulk_p2p" in text) == has_plan
    assert ("fastest of all methods" in text) != has_plan


def test_the_picture_is_drawn(many: list[Result], tmp_path: Path) -> None:
    draw(tmp_path / "bench.png", many, title="a model", subtitle="a machine")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_messages_are_those_that_explain_counts() -> None:
    config = run_of()
    model = model_of(config)
    workload = Workload(sequence=16, batch=3, dtype="float32")
    total = sum(
        kind.count * message_bytes(kind.layer, direction, workload, size=2)
        for kind in layer_kinds(model)
        for direction in kind.directions
    )
    assert total == sum(site.bytes_per_rank_and_micro_batch for site in sites_of_run(model, config))


def test_layers_are_named_as_explain_does() -> None:
    names = [(kind.name, kind.count) for kind in layer_kinds(model_of(run_of()))]
    assert names == [
        ("blocks.*.attention.qkv", 3), ("blocks.*.attention.proj", 3), ("blocks.*.mlp.fc1", 3),
        ("blocks.*.mlp.fc2", 3), ("head.projection", 1),
    ]  # fmt: skip
    late = model_of(run_of(LoraOptions(lora_rank=4, lora_target_modules=("blocks.1.mlp.fc1",))))
    of_late = {kind.name for kind in layer_kinds(late)}
    assert {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1", "blocks.2.mlp.fc1"} <= of_late
    assert "blocks.*.attention.qkv" not in of_late
    assert [(kind.number, kind.count, kind.label) for kind in block_kinds(late)] == [
        (0, 1, " of block 0"), (1, 1, " of block 1"), (2, 1, " of block 2"),
    ]  # fmt: skip


def test_the_switches_plan_is_a_candidate_by_what_matters_in_the_pass() -> None:
    for kind in layer_kinds(model_of(run_of())):
        for direction in kind.directions:
            ways = ways_of(kind.layer, direction, OVERLAP)
            own = fields_of(kind.layer, direction, kind.layer.module.plan)
            assert own in [fields_of(kind.layer, direction, plan) for plan in ways.plans.values()]
            assert "bulk" not in ways.communication
            assert next(iter(ways.communication)) == ALONE


def test_peers_are_those_that_can_be_asked_for() -> None:
    hint = get_type_hints(BenchOptions)["bench_peers"]
    assert set(get_args(get_args(hint)[0])) == {*PEERS, "none"}
    assert BenchOptions().peers == ("dtensor",)
    assert BenchOptions(bench_peers=("none",)).peers == ()
    with pytest.raises(UserError, match="--bench-peers none dtensor"):
        BenchOptions(bench_peers=("none", "dtensor"))
    with pytest.raises(UserError, match="--bench-rounds must be at least 5, got 4"):
        BenchOptions(bench_rounds=4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["--tensor-parallel 1", "--tensor-parallel 2"]),
        ("--tensor-parallel 2", ["without --sequence-parallel", "--tp-comm-overlap"]),
        ("--tensor-parallel 2 --sequence-parallel --pipeline-parallel 2", ["--pipeline-parallel 2", "use 1"]),
        ("--tensor-parallel 3 --sequence-parallel", ["3"]),
        ("--tensor-parallel 2 --sequence-parallel --bench-dir /dev/null/x", ["--bench-dir /dev/null/x"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpt2", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in named), error
