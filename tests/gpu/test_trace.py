"""`shiplap trace` on CUDA: what ran on the device is found, belongs to a layer, and waits are gaps of its stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool
from tests.distributed.test_trace import Traced, trace
from tests.distributed.test_train import command

RUN = (
    "llama3 --num-layers 2 --hidden-size 256 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 512 "
    "--vocab-size 257 --max-sequence-length 256 --sequence-length 256 --batch-size 4 --num-iteration 20 --device cuda "
    "--dtype bfloat16"
)
OVERLAP = "--tensor-parallel 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad"
COLUMNS = [f"blocks.{n}.{layer}" for n in (0, 1) for layer in ("attention.qkv", "mlp.fc1")] + ["head.projection"]
ROWS = [f"blocks.{n}.{layer}" for n in (0, 1) for layer in ("attention.proj", "mlp.fc2")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 400)
    return str(path)


@pytest.fixture(scope="module")
def single() -> Iterator[RankPool]:
    pool = RankPool(1, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


def bounds(item: dict[str, Any]) -> tuple[float, float]:
    return item["ts"], item["ts"] + item["dur"]


def check_modules(traced: Traced, rank: int) -> None:
    """Each module ran once each way, and its products' kernels lie in it."""
    modules = {item["name"]: bounds(item) for item in traced.lanes[rank, "layers"] if item["args"]["step"] == 3}
    for layer in COLUMNS + ROWS:
        names = {name for name in traced.names(rank, "GEMM") if name.startswith(f"{layer} ")}
        assert {name.split()[1] for name in names} == {"forward", "dgrad", "wgrad"}, layer
    for item in traced.lanes[rank, "GEMM"]:
        assert item["args"]["kernel"]
        if item["args"]["step"] == 3:
            direction = "forward" if item["args"]["site"] == "forward" else "backward"
            begin, end = modules[f"{item['args']['layer']} {direction}"]
            # A nanosecond, which is how finely the file is written.
            assert begin <= bounds(item)[0] + 0.002
            assert bounds(item)[1] <= end + 0.002
    for name in ("model forward", "blocks.0 forward", "blocks.1.mlp forward", "blocks.1 backward", "optimizer"):
        assert name in modules


@pytest.mark.gpu(1)
def test_one_device_computes_only(single: RankPool, corpus: str, tmp_path: Path) -> None:
    traced = trace(single, f"{RUN} --data {corpus} --trace-steps 1", tmp_path / "trace")
    assert traced.sites == []
    assert {lane for _, lane in traced.lanes} == {"layers", "GEMM", "other kernels"}
    check_modules(traced, 0)


@pytest.mark.gpu(2)
def test_kernels_are_in_their_lanes_under_their_names(pair: RankPool, corpus: str, tmp_path: Path) -> None:
    traced = trace(pair, f"{RUN} --data {corpus} {OVERLAP} --trace-steps 2", tmp_path / "trace")
    gathers = {f"{layer} forward ring" for layer in COLUMNS} | {f"{layer} wgrad bulk" for layer in COLUMNS}
    scatters = {f"{layer} dgrad p2p" for layer in COLUMNS} | {f"{layer} forward p2p" for layer in ROWS}
    for rank in (0, 1):
        assert set(traced.names(rank, "AG")) == gathers | {f"{layer} dgrad ring" for layer in ROWS}
        assert set(traced.names(rank, "RS")) == scatters
        assert {"embedding forward reduce-scatter", "model forward all-reduce", "step all-reduce"} <= set(
            traced.names(rank, "other comm")
        )
        for lane in ("AG", "RS", "other comm"):
            for item in traced.lanes[rank, lane]:
                assert item["args"]["kernel"].lower().startswith("nccl"), item
        check_modules(traced, rank)
    assert traced.other["clocks"] == "all ranks run on one host and share its clock"


@pytest.mark.gpu(2)
def test_a_wait_is_a_gap_of_the_stream_that_ends_with_its_communication(
    pair: RankPool, corpus: str, tmp_path: Path
) -> None:
    """With nothing overlapped, communication is waited for; no kernel runs meanwhile."""
    flags = "--tensor-parallel 2 --sequence-parallel --trace-steps 1"
    traced = trace(pair, f"{RUN} --data {corpus} {flags}", tmp_path / "trace")
    # Of a model so small a rank may find everything finished when it comes to wait; the other one was waited for then.
    assert any((rank, "waiting") in traced.lanes for rank in (0, 1))
    for rank in (0, 1):
        waits = traced.lanes.get((rank, "waiting"), [])
        computing = sorted(bounds(item) for lane in ("GEMM", "other kernels") for item in traced.lanes[rank, lane])
        under_way = [item for lane in ("AG", "RS", "other comm") for item in traced.lanes[rank, lane]]
        for wait in waits:
            begin, end = bounds(wait)
            # A nanosecond, which is how finely the file is written.
            assert not any(start < end - 0.002 and stop > begin + 0.002 for start, stop in computing), wait
            ends = [bounds(item)[1] for item in under_way if item["name"] == wait["name"]]
            assert any(end <= finished + 0.002 for finished in ends), wait
    for line in traced.steps:
        assert 0 <= line["exposed_ms"] < line["step_ms"]


@pytest.mark.gpu(2)
def test_the_steps_are_those_of_training_to_the_bit(pair: RankPool, corpus: str, tmp_path: Path) -> None:
    run = f"{RUN} --data {corpus} {OVERLAP} --deterministic"
    # Another process must have chosen cuBLAS's workspace before its first product.
    pair.stop()
    assert [code for code, _, _ in pair.run(command, [f"train {run} --run-dir {tmp_path / 'run'}"])] == [0, 0]
    traced = trace(pair, f"{run} --trace-steps 3", tmp_path / "trace")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in traced.steps:
        assert line["train_loss"] == metrics[line["step"] - 1]["train_loss"]
