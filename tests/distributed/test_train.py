"""Training over several ranks: the same losses whatever the layout, and no rank left waiting for another.

Most run `shiplap` on ranks that are there already. What needs the launcher itself starts a real `shiplap`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shiplap.data import write_token_file
from shiplap.dist.launch import WorkerError, first_failure
from tests.distributed.ranks import RankPool, shiplap

Ranks = Callable[[int], RankPool]

# Vocabulary and sequence are not multiples of 2, so both are padded.
MODEL = (
    "train gpt2 --vocab-size 257 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--max-sequence-length 32 --sequence-length 15 --learning-rate 1e-2 --warmup-iteration 3"
)
OVERLAP = "--sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad"


def command(arguments: list[str]) -> tuple[int, str, str]:
    """Run `shiplap` on this rank, with the arguments at its place if there are several; code, output and errors."""
    return shiplap(arguments[dist.get_rank() % len(arguments)].split())


def metrics(pool: RankPool, arguments: str, folder: Path) -> list[dict[str, float]]:
    """Run `shiplap` on all ranks; what it wrote about each step."""
    results = pool.run(command, [f"{arguments} --run-dir {folder}"])
    assert [code for code, _, _ in results] == [0] * pool.num_ranks, results
    assert all(out == "" for _, out, _ in results[1:])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of words, the same every time."""
    words = np.array(["the", "rain", "fell", "in", "torrents", "except", "at", "occasional", "intervals", "when"])
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 4000)))
    return str(path)


@pytest.fixture(scope="module")
def on_one_rank(ranks: Ranks, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    flags = f"--data {corpus} --batch-size 8 --num-iteration 20 --val-loss-every 10"
    return metrics(ranks(1), f"{MODEL} {flags}", tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, "--batch-size 2 --total-batch-size 120", id="gradient accumulation"),
        pytest.param(2, "--batch-size 8 --tensor-parallel 2", id="TP 2"),
        pytest.param(2, "--batch-size 8 --tensor-parallel 2 --sequence-parallel", id="TP 2 + SP"),
        pytest.param(2, f"--batch-size 8 --tensor-parallel 2 {OVERLAP}", id="TP 2 + SP + overlap"),
        pytest.param(2, "--batch-size 4", id="DP 2"),
        pytest.param(2, "--batch-size 2 --total-batch-size 120", id="DP 2, gradient accumulation"),
        pytest.param(4, f"--batch-size 4 --tensor-parallel 2 {OVERLAP}", id="TP 2 + SP + overlap × DP 2"),
    ],
)
def test_losses_and_gradient_norms_are_the_same_whatever_the_layout(
    ranks: Ranks, corpus: str, tmp_path: Path, on_one_rank: list[dict[str, float]], *, num_ranks: int, flags: str
) -> None:
    """20 steps in float32; the norm shows that every parameter's gradient counts once, and the losses that it is used.

    1e-4 relative: sums in another order differ by 1e-7, and 20 steps of AdamW make that grow.
    """
    flags = f"{flags} --data {corpus} --num-iteration 20 --val-loss-every 10"
    lines = metrics(ranks(num_ranks), f"{MODEL} {flags}", tmp_path / "run")

    assert on_one_rank[-2]["train_loss"] < 0.7 * on_one_rank[0]["train_loss"]
    for key in ("step", "train_loss", "learning_rate", "grad_norm"):
        found = [line[key] for line in lines if "train_loss" in line]
        assert found == pytest.approx([line[key] for line in on_one_rank if "train_loss" in line], rel=1e-4), key
    if "total" not in flags and "--batch-size 8" in flags:  # else the validation batches are others
        found = [line["val_loss"] for line in lines if "val_loss" in line]
        assert found == pytest.approx([line["val_loss"] for line in on_one_rank if "val_loss" in line], rel=1e-4)


def test_bfloat16_follows_float32(
    ranks: Ranks, corpus: str, tmp_path: Path, on_one_rank: list[dict[str, float]]
) -> None:
    flags = f"--tensor-parallel 2 {OVERLAP} --dtype bfloat16 --data {corpus} --batch-size 8 --num-iteration 20"
    lines = metrics(ranks(2), f"{MODEL} {flags}", tmp_path / "run")
    expected = [line["train_loss"] for line in on_one_rank if "train_loss" in line]
    # bfloat16 has 8 bits: each product is off by up to 0.4 %.
    assert [line["train_loss"] for line in lines] == pytest.approx(expected, rel=0.02)


def test_a_sample_needs_all_ranks_of_one_replica_only(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    flags = f"--tensor-parallel 2 --sequence-parallel --data {corpus} --batch-size 2 --num-iteration 2"
    folder = tmp_path / "run"
    metrics(ranks(4), f"{MODEL} {flags} --sample-every 1 --sample-num-tokens 40", folder)
    assert re.findall(r"--- step (\d) ---", (folder / "samples.txt").read_text()) == ["1", "2"]


def test_dropout_differs_between_replicas_and_not_between_runs(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    flags = f"--dropout 0.5 --data {corpus} --batch-size 4 --num-iteration 3"
    first = metrics(ranks(2), f"{MODEL} {flags}", tmp_path / "first")
    again = metrics(ranks(2), f"{MODEL} {flags}", tmp_path / "again")
    assert [line["train_loss"] for line in first] == [line["train_loss"] for line in again]


def test_ranks_that_were_started_differently_all_stop_and_say_where(ranks: Ranks) -> None:
    """The topology itself differs, so they could not even make their groups."""
    results = ranks(2).run(command, ["train gpt2 --tensor-parallel 2", "train gpt2 --tensor-parallel 1"])
    assert [code for code, _, _ in results] == [2, 2]
    errors = [err for _, _, err in results]
    assert "differ in --tensor-parallel: rank 0: 2; rank 1: 1" in errors[0]
    assert errors[1] == ""


def test_a_world_that_does_not_fit_is_said_once(ranks: Ranks) -> None:
    results = ranks(2).run(command, ["train gpt2 --tensor-parallel 3"])
    assert [code for code, _, _ in results] == [2, 2]
    assert re.search(r"^shiplap: error: The world has 2 ranks.* 3 × 1 = 3", results[0][2])
    assert results[1][2] == ""


def test_a_folder_that_rank_0_alone_cannot_write_stops_all(ranks: Ranks, corpus: str) -> None:
    results = ranks(2).run(command, [f"{MODEL} --data {corpus} --batch-size 2 --run-dir {corpus}/run"])
    assert [code for code, _, _ in results] == [2, 2]
    assert f"rank 0: --run-dir {corpus}/run" in results[0][2]
    assert results[1][2] == ""


def test_a_bad_token_that_one_replica_alone_reads_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(
        command, [f"{MODEL} --input-bin {_with_a_bad_token(tmp_path)} --batch-size 1 --run-dir {tmp_path}/run"]
    )
    assert [code for code, _, _ in results] == [2, 2]
    assert re.search(r"error: rank [01]: --input-bin .*token 300 at position 700 .* vocabulary of 257", results[0][2])
    assert results[1][2] == ""
    assert "Traceback" not in results[0][1] + results[0][2]


def _with_a_bad_token(folder: Path) -> Path:
    tokens = np.arange(1000) % 200
    tokens[700] = 300
    write_token_file(folder / "bad.bin", [tokens], vocab_size=301)
    return folder / "bad.bin"


@contextmanager
def started(arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`shiplap` in a process of its own, which is stopped at the end if it still runs."""
    command_line = [sys.executable, "-m", "shiplap", *arguments.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_shiplap_starts_its_own_workers(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = f"--tensor-parallel 2 {OVERLAP} --data {corpus} --batch-size 4 --num-iteration 8 --run-dir {folder}"
    with started(f"{MODEL} {flags}") as process:
        out, err = process.communicate()

    assert (process.returncode, err) == (0, "")
    assert "2 ranks: TP 2 × DP 1 × PP 1" in out
    assert len(re.findall(r"^step \d/8 \| train loss", out, re.MULTILINE)) == 8
    assert out.endswith(f"run folder: {folder}\n")
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl", "tensorboard", "loss.png"}
    losses = [json.loads(line)["train_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5


def test_a_mistake_that_workers_find_is_said_once_and_ends_all(tmp_path: Path) -> None:
    flags = f"--tensor-parallel 2 --input-bin {_with_a_bad_token(tmp_path)} --batch-size 1 --run-dir {tmp_path}/run"
    with started(f"{MODEL} {flags}") as process:
        out, err = process.communicate()
    assert process.returncode == 2
    assert err.count("\n") == err.count("token 300") == 1
    assert "Traceback" not in out + err


def test_an_interrupt_stops_all_workers(corpus: str, tmp_path: Path) -> None:
    flags = f"--tensor-parallel 2 --data {corpus} --batch-size 1 --num-iteration 1000000 --run-dir {tmp_path}/run"
    with started(f"{MODEL} {flags}") as process:
        assert process.stdout is not None
        assert any(line.startswith("step 1/") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        # The workers have the same output, so that it ends only when they have ended.
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "")


def _failure(folder: Path, rank: int, *, exit_code: int, written: int | None) -> ProcessFailure:
    error_file = folder / f"{rank}.json"
    if written is not None:
        error_file.write_text(json.dumps({"message": {"message": "", "extraInfo": {"timestamp": "0"}}}))
        os.utime(error_file, ns=(written, written))
    return ProcessFailure(local_rank=rank, pid=0, exitcode=exit_code, error_file=str(error_file))


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param([(1, 9), (1, 8), (-signal.SIGTERM, None)], id="the first to write down its error"),
        pytest.param([(1, 7), (-signal.SIGKILL, None), (1, 8)], id="one that was killed, and the others lost it"),
        pytest.param([(-signal.SIGTERM, None), (1, None)], id="one that failed at import"),
    ],
)
def test_the_rank_that_failed_by_itself_is_named(tmp_path: Path, failures: list[tuple[int, int | None]]) -> None:
    """It is rank 1 each time."""
    by_rank = {
        rank: _failure(tmp_path, rank, exit_code=exit_code, written=written)
        for rank, (exit_code, written) in enumerate(failures)
    }
    rank, failure = first_failure(ChildFailedError("workers", by_rank))
    assert rank == 1
    error = WorkerError(rank, failure.exitcode)
    assert "rank 1" in str(error)
    assert error.exit_code == (137 if failure.exitcode == -signal.SIGKILL else 1)


def test_exposed_communication_is_reported_where_there_is_some(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    flags = f"--data {corpus} --batch-size 8 --num-iteration 2"
    alone = metrics(ranks(1), f"{MODEL} {flags}", tmp_path / "alone")
    assert [line["exposed_tp_comm_ms"] for line in alone] == [0.0, 0.0]
    for name, topology in (("TP", "--tensor-parallel 2"), ("overlap", f"--tensor-parallel 2 {OVERLAP}")):
        for line in metrics(ranks(2), f"{MODEL} {flags} {topology}", tmp_path / name):
            assert 0.0 < line["exposed_tp_comm_ms"] < line["step_ms"]
            share = 100 * line["exposed_tp_comm_ms"] / line["step_ms"]
            assert line["exposed_tp_comm_percent"] == pytest.approx(share)
