"""`--deterministic`: started twice alike, a run leaves the same bits behind, whatever overlaps."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from shiplap.config import UserError
from shiplap.config.train import RunOptions
from shiplap.dist import GlobalEnv
from shiplap.models.decoder import DecoderModel
from shiplap.train.determinism import check_environment, reproducible
from shiplap.train.model import make_model
from shiplap.train.setup import Setup
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]

# Vocabulary and sequence are not multiples of 2, so both are padded.
SIZES = (
    "--vocab-size 257 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--max-sequence-length 32 --sequence-length 15 --batch-size 4 --learning-rate 1e-2 --warmup-iteration 2 "
    "--num-iteration 3 --val-loss-every 3 --sample-every 3 --sample-num-tokens 10"
)
OVERLAP = "--sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad"
ON_TWO = f"{SIZES} --tensor-parallel 2 {OVERLAP}"
# With three key-value heads for six queries, two ranks share one: attention indexes its keys, and gradients are summed.
SHARED_HEADS = ON_TWO.replace("--hidden-size 32 --num-attention-heads 4", "--hidden-size 48 --num-attention-heads 6")
SHARED_HEADS += " --num-key-value-heads 3"
TIMES = ("step_ms", "tokens_per_s", "exposed_tp_comm_ms", "exposed_tp_comm_percent")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of words, the same every time."""
    words = np.array(["the", "rain", "fell", "in", "torrents", "except", "at", "occasional", "intervals", "when"])
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 4000)))
    return str(path)


def command_with_complaints(arguments: str) -> tuple[int, str, list[str]]:
    """Run `shiplap` on this rank; its code, its errors, and what PyTorch said about determinism."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code, _, err = command([arguments])
    return code, err, [str(warning.message) for warning in caught if "determinis" in str(warning.message)]


def run(pool: RankPool, arguments: str, folder: Path, function: Any = command_with_complaints) -> dict[str, Any]:
    """Train on all ranks; everything that the run leaves behind, by name.

    Operators without a fixed order raise or complain; so none was used.
    """
    kept = f"--save {folder}/model" + (f" --lora-save-path {folder}/adapters" if "--lora-rank" in arguments else "")
    results = pool.run(function, f"{arguments} {kept} --run-dir {folder}/run")
    assert results == [(0, "", [])] * pool.num_ranks
    return left_behind(folder)


def left_behind(folder: Path) -> dict[str, Any]:
    """Metrics without the times, samples, and every saved file."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
        "samples": (folder / "run" / "samples.txt").read_text(),
    }
    for kind in ("model", "adapters"):
        files = [path for path in (folder / kind).rglob("*") if path.is_file()]
        found |= {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return found


def differences(first: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """The names of what is not the same to the bit."""
    assert "metrics" in first
    assert any(name.endswith("model.safetensors") for name in first), sorted(first)
    return [name for name in sorted(first | again) if name not in first or first[name] != again.get(name)]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(2, f"gpt2 --dropout 0.1 {ON_TWO}", id="gpt2, float32"),
        pytest.param(2, f"gpt2 --dropout 0.1 {ON_TWO} --dtype bfloat16", id="gpt2, bfloat16"),
        pytest.param(2, f"mixtral {ON_TWO}", id="mixtral, float32"),
        pytest.param(2, f"mixtral {ON_TWO} --dtype bfloat16", id="mixtral, bfloat16"),
        pytest.param(2, f"llama3 {SHARED_HEADS} --recompute full", id="llama3, shared heads, recomputation"),
        pytest.param(2, f"qwen3 {ON_TWO} --lora-rank 4 --lora-dropout 0.1", id="qwen3, adapters"),
        pytest.param(4, f"gpt2 --dropout 0.1 {SIZES} --tensor-parallel 4 {OVERLAP}", id="gpt2, TP 4"),
        pytest.param(4, f"gpt2 --dropout 0.1 {ON_TWO} --total-batch-size 240", id="gpt2, TP 2 × DP 2, accumulation"),
    ],
)
def test_a_run_repeats_to_the_bit(ranks: Ranks, corpus: str, tmp_path: Path, *, num_ranks: int, flags: str) -> None:
    arguments = f"train {flags} --data {corpus} --deterministic"
    first = run(ranks(num_ranks), arguments, tmp_path / "first")
    again = run(ranks(num_ranks), arguments, tmp_path / "again")
    assert differences(first, again) == []
    losses = [line["train_loss"] for line in first["metrics"] if "train_loss" in line]
    assert losses[-1] < losses[0]
    assert ("adapters/adapter_model.safetensors" in first) == ("--lora-rank" in flags)


def test_so_it_does_when_shiplap_starts_its_own_workers(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    """Other processes, with other hash seeds and addresses; the ranks of the tests have one thread each."""
    arguments = f"train mixtral {ON_TWO} --lora-rank 4 --data {corpus} --deterministic"
    first = run(ranks(2), arguments, tmp_path / "first")
    folder = tmp_path / "again"
    kept = f"--save {folder}/model --lora-save-path {folder}/adapters --run-dir {folder}/run"
    subprocess.run(
        [sys.executable, "-m", "shiplap", *f"{arguments} {kept}".split()],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert differences(first, left_behind(folder)) == []


def command_with_filled_memory(arguments: str) -> tuple[int, str, list[str]]:
    """PyTorch's deterministic mode without shiplap's, so that allocated memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        return command_with_complaints(arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["gpt2 --dropout 0.1", "mixtral"])
def test_the_mode_changes_no_bit_on_the_cpu(ranks: Ranks, corpus: str, tmp_path: Path, family: str) -> None:
    """One thread has one order anyway. And nothing reads memory that it has not written, though it is not filled."""
    arguments = f"train {family} {ON_TWO} --data {corpus}"
    without = run(ranks(2), arguments, tmp_path / "without")
    assert differences(without, run(ranks(2), f"{arguments} --deterministic", tmp_path / "with")) == []
    filled = run(ranks(2), arguments, tmp_path / "filled", command_with_filled_memory)
    assert differences(without, filled) == []


def shared_heads_gradient() -> torch.Tensor:
    """Of keys that several queries read, as attention reads them where ranks share heads."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 1024, 64, generator=generator, requires_grad=True)
    read = keys[:, [0, 0, 0, 1, 1, 1, 1]]
    read.backward(torch.randn(read.shape, generator=generator))
    assert keys.grad is not None
    return keys.grad


def test_several_threads_add_in_one_order() -> None:
    """Without the mode, two threads that add to the same keys gave other bits in 15 of 19 repetitions."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with reproducible(RunOptions(deterministic=True)):
        first, *others = [shared_heads_gradient() for _ in range(10)]
    torch.set_num_threads(num_threads)
    assert all(torch.equal(first, other) for other in others)


def modes_of_training(arguments: str) -> list[int]:
    """PyTorch's mode while this rank makes its model, and after the run."""
    modes = []

    def watch(setup: Setup, env: GlobalEnv) -> DecoderModel:
        modes.append(torch.get_deterministic_debug_mode())
        return make_model(setup, env)

    with patch("shiplap.train.trainer.make_model", watch):
        code, _, err = command([arguments])
    assert code == 0, err
    return [*modes, torch.get_deterministic_debug_mode()]


def test_every_rank_computes_in_the_mode_and_leaves_it(ranks: Ranks, corpus: str, tmp_path: Path) -> None:
    arguments = f"train gpt2 {SIZES} --tensor-parallel 2 --data {corpus} --run-dir {tmp_path}/run --deterministic"
    assert ranks(2).run(modes_of_training, arguments) == [[2, 0], [2, 0]]


def test_ranks_must_agree_on_it(ranks: Ranks) -> None:
    results = ranks(2).run(command, ["train gpt2 --deterministic", "train gpt2"])
    assert [code for code, _, _ in results] == [2, 2]
    assert "differ in --deterministic: rank 0: True; rank 1: False" in results[0][2]


VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Of the variables that matter, these only."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with patch.dict(os.environ, others | variables, clear=True):
        yield


def global_state() -> tuple[object, ...]:
    memory: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        {name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def states(options: RunOptions, given: dict[str, str], *, warns: bool) -> list[tuple[object, ...]]:
    """The global state before, inside and after a computation that fails, as an embedding program may have set it."""
    with environment(**given):
        torch.use_deterministic_algorithms(warns, warn_only=warns)
        torch.backends.cudnn.benchmark = warns
        found = [global_state()]
        try:
            with reproducible(options):
                found.append(global_state())
                raise ZeroDivisionError
        except ZeroDivisionError:
            found.append(global_state())
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    return found


@pytest.mark.parametrize("warns", [False, True])
@pytest.mark.parametrize(
    ("device", "given", "added"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}),
        ("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}),
    ],
)
def test_what_was_set_before_is_put_back(
    device: Any, given: dict[str, str], added: dict[str, str], *, warns: bool
) -> None:
    before, inside, after = states(RunOptions(deterministic=True, device=device), given, warns=warns)
    assert before == after == (warns, warns, True, warns, given)
    assert inside == (True, False, False, False, given | added)
    assert len(set(map(str, states(RunOptions(device=device), given, warns=warns)))) == 1


def test_an_environment_that_does_not_repeat_is_refused() -> None:
    on_cuda = RunOptions(deterministic=True, device="cuda")
    for name, value, values in (
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", ":4096:8 or :16:8"),
        ("NCCL_NVLS_ENABLE", "1", "0"),
        ("NCCL_COLLNET_ENABLE", "1", "0"),
    ):
        with environment(**{name: value}):
            with pytest.raises(UserError, match=f"--deterministic: .* {name}={value}, .* {values}"):
                check_environment(on_cuda)
            for options in (RunOptions(device="cuda"), RunOptions(deterministic=True)):
                check_environment(options)
    with environment(CUBLAS_WORKSPACE_CONFIG=":16:8"):
        check_environment(on_cuda)
