"""`shiplap trace` on ranks: the steps of `shiplap train` to the bit, each communication in its lane, under its name."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 257 --max-sequence-length 32"
STEPS = "--sequence-length 15 --batch-size 2 --num-iteration 20 --learning-rate 1e-2 --warmup-iteration 3"
SP = "--tensor-parallel 2 --sequence-parallel"
OVERLAP = f"{SP} --tp-comm-overlap --tp-comm-overlap-rs-dgrad"
LANES = {"layers", "GEMM", "AG", "RS", "other comm", "waiting"}
PICTURE = b"\x89PNG"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What a trace's folder says.

    Attributes:
        out: standard output of the first rank.
        lanes: slices by rank and lane; lanes beneath a lane belong to it.
        steps: lines about steps.
        sites: lines about sites.
        other: what else the trace file says.
    """

    out: str
    lanes: dict[tuple[int, str], list[dict[str, Any]]]
    steps: list[dict[str, Any]]
    sites: list[dict[str, Any]]
    other: dict[str, str]

    def names(self, rank: int, lane: str, *, step: int = 3) -> Counter[str]:
        """How often each name is in a lane, in one step."""
        return Counter(item["name"] for item in self.lanes.get((rank, lane), []) if item["args"]["step"] == step)


def read(out: str, folder: Path) -> Traced:
    content = json.loads((folder / "trace.json").read_text())
    events = content["traceEvents"]
    named = {
        (event["pid"], event["tid"]): re.sub(r" \(\d+\)$", "", event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], named[event["pid"], event["tid"]]), []).append(event)
    lines = [json.loads(line) for line in (folder / "exposed.jsonl").read_text().splitlines()]
    assert (folder / "exposed.png").read_bytes().startswith(PICTURE)
    profile = json.loads((folder / "profiler-rank0.json").read_text())
    assert any(event["name"] == "aten::mm" for event in profile["traceEvents"])
    return Traced(
        out=out,
        lanes=lanes,
        steps=[line for line in lines if "layer" not in line],
        sites=[line for line in lines if "layer" in line],
        other=content["otherData"],
    )


def trace(pool: RankPool, arguments: str, folder: Path) -> Traced:
    """Run it on all ranks."""
    results = pool.run(command, [f"trace {arguments} --trace-dir {folder}"])
    assert [(code, err) for code, _, err in results] == [(0, "")] * pool.num_ranks, results
    assert all(out == "" for _, out, _ in results[1:])
    return read(results[0][1], folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 200)
    return str(path)


@pytest.mark.parametrize(
    ("num_ranks", "family", "flags"),
    [
        pytest.param(1, "gpt2", "", id="one rank"),
        pytest.param(2, "gpt2", "--tensor-parallel 2", id="TP 2"),
        pytest.param(2, "llama3", f"{SP} --dropout 0.1", id="SP, dropout"),
        pytest.param(2, "gpt2", f"{OVERLAP} --total-batch-size 60", id="overlap, two micro-batches"),
        pytest.param(2, "mixtral", OVERLAP, id="experts"),
        pytest.param(2, "gpt2", f"{OVERLAP} --lora-rank 2 --lora-dropout 0.1", id="adapters"),
        pytest.param(2, "qwen3", f"{OVERLAP} --recompute full --dtype bfloat16", id="recompute full"),
        pytest.param(2, "llama3", f"{OVERLAP} --recompute selective", id="recompute selective"),
        pytest.param(2, "gpt2", "", id="DP 2"),
        pytest.param(4, "gpt2", OVERLAP, id="TP 2 × DP 2"),
    ],
)
def test_the_steps_are_those_of_training_to_the_bit(
    ranks: Ranks, corpus: str, tmp_path: Path, *, num_ranks: int, family: str, flags: str
) -> None:
    pool, run = ranks(num_ranks), f"{family} {SMALL} {STEPS} --data {corpus} {flags}"
    assert [code for code, _, _ in pool.run(command, [f"train {run} --run-dir {tmp_path / 'run'}"])] == [0] * num_ranks
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    traced = trace(pool, f"{run} --trace-steps 2 --trace-warmup 2", tmp_path / "trace")

    assert [line["rank"] for line in traced.steps] == [rank for rank in range(num_ranks) for _ in (3, 4)]
    for line in traced.steps:
        assert line["train_loss"] == metrics[line["step"] - 1]["train_loss"]
        assert 0 <= line["exposed_ms"] <= line["communication_ms"] + 1e-6 < line["step_ms"]
        assert (line["communication_ms"] > 0) == (num_ranks > 1)
    for rank in range(num_ranks):
        assert {lane for number, lane in traced.lanes if number == rank} <= LANES
        assert traced.names(rank, "layers")["step 3"] == 1
        # No communication was waited for twice, and every rank did the same.
        communications = sum((traced.names(rank, lane) for lane in ("AG", "RS", "other comm")), Counter())
        assert traced.names(rank, "waiting") <= communications
        assert communications == sum((traced.names(0, lane) for lane in ("AG", "RS", "other comm")), Counter())
        assert traced.names(rank, "GEMM") == traced.names(0, "GEMM")
    assert not any("shiplap" in name for name in traced.names(0, "layers"))


def test_each_communication_is_in_its_lane_under_its_name(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    traced = trace(ranks(2), f"gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-steps 1", tmp_path / "trace")
    columns, rows = ("attention.qkv", "mlp.fc1"), ("attention.proj", "mlp.fc2")
    blocks = ("blocks.0", "blocks.1")
    in_blocks = [f"{block}.{layer}" for block in blocks for layer in columns]
    out_of_blocks = [f"{block}.{layer}" for block in blocks for layer in rows]
    all_columns = [*in_blocks, "head.projection"]
    # With two ranks, a ring's gather and an exchange's scatter are one transfer each.
    gathers = [f"{layer} forward ring" for layer in all_columns] + [f"{layer} wgrad bulk" for layer in all_columns]
    assert traced.names(0, "AG") == Counter(gathers + [f"{layer} dgrad ring" for layer in out_of_blocks])
    scatters = [f"{layer} dgrad p2p" for layer in all_columns]
    assert traced.names(0, "RS") == Counter(scatters + [f"{layer} forward p2p" for layer in out_of_blocks])
    norms = [f"{block}.{norm}" for block in blocks for norm in ("attention_norm", "mlp_norm")]
    assert traced.names(0, "other comm") == Counter(
        [f"{norm} backward all-reduce" for norm in [*norms, "final_norm"]]
        + ["embedding forward reduce-scatter", "embedding backward all-gather", "positions backward all-gather"]
        + 2 * ["model forward all-reduce"]
        + ["step all-reduce"]
    )
    # A pipeline multiplies each of the two shards by itself; wgrad, and what comes after a gather, is one product.
    products = traced.names(0, "GEMM")
    assert products["blocks.0.mlp.fc1 forward ring"] == products["blocks.0.mlp.fc1 dgrad p2p"] == 2
    assert products["blocks.0.mlp.fc1 wgrad"] == products["blocks.0.mlp.fc2 wgrad"] == 1
    assert sum(products.values()) == 9 * (2 + 2 + 1)
    layers = traced.names(0, "layers")
    for module in ("blocks.1.mlp.fc1", "blocks.1.mlp", "blocks.1", "head.projection"):
        assert layers[f"{module} forward"] == layers[f"{module} backward"] == 1, module
    assert layers["model forward"] == layers["optimizer"] == 1


def test_slices_of_one_step_lie_in_it_and_in_their_modules(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    traced = trace(ranks(2), f"gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-steps 1", tmp_path / "trace")

    def bounds(item: dict[str, Any]) -> tuple[float, float]:
        return item["ts"], item["ts"] + item["dur"]

    for rank in (0, 1):
        layers = {item["name"]: bounds(item) for item in traced.lanes[rank, "layers"]}
        first, last = layers["step 3"]
        for lane in LANES:
            for item in traced.lanes[rank, lane]:
                assert first <= bounds(item)[0] <= bounds(item)[1] <= last
        for item in traced.lanes[rank, "GEMM"]:
            direction = "forward" if item["args"]["site"] == "forward" else "backward"
            begin, end = layers[f"{item['args']['layer']} {direction}"]
            assert begin <= bounds(item)[0] <= bounds(item)[1] <= end
        # What is waited for is under way. Times are rounded to a nanosecond.
        under_way = [item for lane in ("AG", "RS", "other comm") for item in traced.lanes[rank, lane]]
        for wait in traced.lanes[rank, "waiting"]:
            own = [bounds(item) for item in under_way if item["name"] == wait["name"]]
            assert any(begin <= bounds(wait)[0] and bounds(wait)[1] <= end + 0.002 for begin, end in own)
    # One clock: the ranks take the step at the same time.
    (begin_0, end_0), (begin_1, end_1) = (
        next(bounds(item) for item in traced.lanes[rank, "layers"] if item["name"] == "step 3") for rank in (0, 1)
    )
    assert max(begin_0, begin_1) < min(end_0, end_1)
    assert traced.other["clocks"] == "all ranks run on one host and share its clock"


def test_what_recomputation_communicates_is_told_apart(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    run = f"gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --recompute full --trace-steps 1"
    traced = trace(ranks(2), run, tmp_path / "trace")
    assert traced.names(0, "AG")["blocks.0.mlp.fc1 forward ring"] == 1
    assert traced.names(0, "AG")["blocks.0.mlp.fc1 recompute ring"] == 1
    assert traced.names(0, "GEMM")["blocks.0.mlp.fc1 recompute ring"] == 2
    assert traced.names(0, "layers")["blocks.0.mlp.fc1 recompute"] == 1
    (site,) = [
        s for s in traced.sites if s["rank"] == 0 and (s["layer"], s["site"]) == ("blocks.*.mlp.fc1", "recompute")
    ]
    assert (site["num_layers"], site["method"], site["num_communications"]) == (2, "ring", 2)


def test_without_sequence_parallelism_a_scatter_is_an_all_reduce(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    run = f"gpt2 {SMALL} {STEPS} --data {corpus} --tensor-parallel 2 --trace-steps 1"
    traced = trace(ranks(2), run, tmp_path / "trace")
    assert (0, "AG") not in traced.lanes
    assert traced.names(0, "RS")["blocks.0.mlp.fc2 forward replicated"] == 1
    assert {item["args"]["collective"] for item in traced.lanes[0, "RS"]} == {"all-reduce"}
    # [15 tokens, 2 sequences, 32 features] in float32
    assert {item["args"]["bytes"] for item in traced.lanes[0, "RS"]} == {15 * 2 * 32 * 4}


def test_the_table_and_the_lines_say_the_same(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    traced = trace(ranks(2), f"gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-steps 2", tmp_path / "trace")
    table = {tuple(re.split(r"  +", line)[:4]) for line in traced.out.splitlines() if line.endswith(" %")}
    own = [s for s in traced.sites if (s["layer"], s["site"]) == ("blocks.*.attention.qkv", "forward")]
    assert [(s["rank"], s["step"], s["num_layers"], s["method"]) for s in own] == [
        (rank, step, 2, "ring") for rank in (0, 1) for step in (3, 4)
    ]
    mean = sum(s["communication_ms"] for s in own) / 4
    assert ("blocks.*.attention.qkv × 2", "forward", "ring", f"{mean:.2f} ms") in table
    for line in traced.steps:
        waits = [w for w in traced.lanes[line["rank"], "waiting"] if w["args"]["step"] == line["step"]]
        assert line["exposed_ms"] == pytest.approx(sum(w["dur"] for w in waits) / 1000)
        parts = [s["exposed_ms"] for s in traced.sites if (s["rank"], s["step"]) == (line["rank"], line["step"])]
        assert line["exposed_ms"] == pytest.approx(sum(parts))
        assert line["exposed_percent"] == pytest.approx(100 * line["exposed_ms"] / line["step_ms"])
    assert "open it in https://ui.perfetto.dev" in traced.out
    assert len(re.findall(r"step \d/4 \| (?:warm-up|traced) \| train loss \d\.\d{4} \| \d+\.\d ms", traced.out)) == 4


def test_it_starts_its_own_workers_and_takes_a_folder_of_its_own(corpus: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "trace.json").write_text("somebody's")
    arguments = f"trace gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-steps 1 --trace-dir {taken} --save model"
    done = subprocess.run(
        [sys.executable, "-m", "shiplap", *arguments.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (taken / "trace.json").read_text() == "somebody's"
    traced = read(done.stdout, tmp_path / "taken-2")
    assert len(traced.steps) == 2
    assert "--save does nothing here" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "taken-2"]


def test_one_rank_has_nothing_to_communicate(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    traced = trace(ranks(1), f"gpt2 {SMALL} {STEPS} --data {corpus} --trace-steps 1", tmp_path / "trace")
    assert "TP 1: there is no tensor-parallel communication to show" in traced.out
    assert traced.sites == []
    assert traced.names(0, "GEMM")["blocks.0.mlp.fc1 forward replicated"] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trace-steps 1", "--trace-steps 2"], ["--trace-steps", "rank 0: 1", "rank 1: 2"]),
        (["--trace-dir /dev/null/here"], ["--trace-dir /dev/null/here"]),
        (["--num-iteration 4"], ["--trace-warmup 2", "--num-iteration 4"]),
    ],
)
def test_mistakes_are_named_once_and_leave_nothing(
    ranks: Ranks, corpus: str, tmp_path: Path, *, arguments: list[str], named: list[str]
) -> None:
    folder = tmp_path / "trace"
    run = f"trace gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-dir {folder}"
    results = ranks(2).run(command, [f"{run} {own}" for own in arguments])
    assert [code for code, _, _ in results] == [2, 2]
    assert all(out == "" for _, out, _ in results)
    assert all(part in results[0][2] for part in named), results[0][2]
    assert not folder.exists()


def test_a_rank_that_dies_ends_the_job(corpus: str, tmp_path: Path) -> None:
    """The other rank has threads that wait for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import shiplap.train.step as step\n"
        "    def broken(*arguments, **named):\n"
        "        raise RuntimeError('a link is down')\n"
        "    step.clip_gradients = broken\n"
    )
    arguments = (
        f"trace gpt2 {SMALL} {STEPS} --data {corpus} {OVERLAP} --trace-warmup 1 --trace-dir {tmp_path / 'trace'}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shiplap", *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        timeout=120,
    )
    assert done.returncode == 1
    assert "RuntimeError: a link is down" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("shiplap: error: rank 1 failed")
