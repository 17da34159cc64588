"""`--deterministic` on CUDA: operators with a fixed order everywhere, and the same bits from another set of processes.

All runs are in processes that compute nothing else: cuBLAS and NCCL read their environment once.
"""

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shiplap.config import ModelParallelConfig, TrainConfig
from shiplap.config.lora import LoraOptions
from shiplap.config.train import DataOptions, ModelOptions, OptimizerOptions, RunOptions
from shiplap.dist.agreement import AgreedError
from shiplap.train.trainer import train
from tests.distributed.ranks import RankPool
from tests.distributed.test_deterministic import differences, left_behind

BACKEND = "cpu:gloo,cuda:nccl"
ON_TWO = {
    "tensor_parallel_size": 2,
    "sequence_parallel": True,
    "tp_comm_overlap": True,
    "tp_comm_overlap_rs_dgrad": True,
}
# Two ranks share one of the three key-value heads: attention indexes its keys.
SHARED_HEADS = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, where it is not like all of them; the fields are the groups of options."""

    family: str
    model: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    dtype: Any = "bfloat16"

    def config(self, corpus: str, folder: Path) -> TrainConfig:
        """Sizes at which an order can differ.

        Attention's backward has several blocks of keys to add up, and there are more tokens than the embedding's
        backward takes in one go (3072). Vocabulary and sequence are not multiples of 2, so both are padded.
        """
        sizes = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "max_sequence_length": 1024}
        adapters = {"lora_save_path": f"{folder}/adapters"} if self.lora else {}
        return TrainConfig(
            parallel=ModelParallelConfig(**self.parallel),
            model=ModelOptions(**(sizes | dict(self.model))),
            data=DataOptions(data=(corpus,), batch_size=4, sequence_length=1023, **self.data),
            optimizer=OptimizerOptions(num_iteration=3, warmup_iteration=2),
            lora=LoraOptions(**(adapters | dict(self.lora))),
            run=RunOptions(
                deterministic=True,
                device="cuda",
                dtype=self.dtype,
                run_dir=f"{folder}/run",
                save=f"{folder}/model",
                val_loss_every=3,
                val_num_batches=2,
                sample_every=3,
                sample_num_tokens=10,
            ),
        )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half a megabyte: enough for all steps and validation batches of two replicas."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text(" ".join(str(number * number) for number in range(50_000)))
    return str(path)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[RankPool]]:
    """Two pools of one rank."""
    pools = [RankPool(1, backend=BACKEND) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.stop()


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[RankPool]]:
    """Two pools of two ranks, one rank a device."""
    pools = [RankPool(2, backend=BACKEND) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.stop()


def complaints(family: str, config: TrainConfig) -> list[str]:
    """Train as this rank; what PyTorch says about operators without a fixed order, if none raises."""
    torch.cuda.set_device(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        train(family, config)
    return [str(warning.message) for warning in caught if "determinis" in str(warning.message)]


def repeats(pools: list[RankPool], case: Case, corpus: str, folder: Path) -> list[str]:
    """Train in each of the pools; what differs."""
    found = []
    for number, pool in enumerate(pools):
        own = folder / str(number)
        assert pool.run(complaints, case.family, case.config(corpus, own)) == [[]] * pool.num_ranks
        found.append(left_behind(own))
    assert ("adapters/adapter_model.safetensors" in found[0]) == bool(case.lora)
    return differences(*found)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(family="gpt2"), id="gpt2"),
        pytest.param(Case(family="gpt2", model={"dropout": 0.1}), id="gpt2, dropout"),
        pytest.param(Case(family="gpt2", model={"dropout": 0.1, "recompute": "full"}), id="gpt2, dropout, full"),
        pytest.param(Case(family="llama3", model={"num_key_value_heads": 2}), id="llama3, grouped queries"),
        pytest.param(
            Case(family="llama3", model={"num_key_value_heads": 2, "recompute": "selective"}), id="llama3, selective"
        ),
        pytest.param(Case(family="qwen3", lora={"lora_rank": 8, "lora_dropout": 0.1}), id="qwen3, adapters"),
        pytest.param(Case(family="mixtral"), id="mixtral"),
        pytest.param(Case(family="mixtral", model={"recompute": "full"}), id="mixtral, full"),
        # Flash attention has no float32: memory-efficient here, and the plain one where queries are grouped.
        pytest.param(Case(family="gpt2", model={"dropout": 0.1}, dtype="float32"), id="gpt2, float32"),
        pytest.param(Case(family="mixtral", dtype="float32"), id="mixtral, float32"),
    ],
)
def test_a_run_repeats_to_the_bit(alone: list[RankPool], corpus: str, tmp_path: Path, case: Case) -> None:
    assert repeats(alone, case, corpus, tmp_path) == []


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(family="gpt2", parallel=ON_TWO, model={"dropout": 0.1}), id="gpt2, dropout"),
        pytest.param(Case(family="gpt2", parallel=ON_TWO, dtype="float32"), id="gpt2, float32"),
        pytest.param(Case(family="llama3", parallel=ON_TWO, model={"recompute": "full"}), id="llama3, full"),
        pytest.param(Case(family="llama3", parallel=ON_TWO, model=SHARED_HEADS), id="llama3, shared heads"),
        pytest.param(Case(family="llama3", parallel={"tensor_parallel_size": 2}), id="llama3, no sequence parallelism"),
        pytest.param(Case(family="qwen3", parallel=ON_TWO), id="qwen3"),
        pytest.param(Case(family="qwen3", parallel=ON_TWO, lora={"lora_rank": 8}), id="qwen3, adapters"),
        pytest.param(Case(family="mixtral", parallel=ON_TWO), id="mixtral"),
        pytest.param(
            Case(family="mixtral", parallel=ON_TWO | {"tp_comm_keep_gathered": True}),
            id="mixtral, gathered inputs kept",
        ),
        pytest.param(
            Case(family="gpt2", model={"dropout": 0.1}, data={"total_batch_size": 4 * 4 * 1023}),
            id="gpt2, DP 2, accumulation",
        ),
    ],
)
def test_a_run_on_two_devices_repeats_to_the_bit(
    pairs: list[RankPool], corpus: str, tmp_path: Path, case: Case
) -> None:
    assert repeats(pairs, case, corpus, tmp_path) == []


def refusal(config: TrainConfig) -> str:
    torch.cuda.set_device(dist.get_rank())
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:2:16:8"):
        try:
            train("gpt2", config)
        except AgreedError as error:
            return str(error)
    return ""


@pytest.mark.gpu(1)
def test_a_workspace_that_does_not_repeat_is_refused(alone: list[RankPool], corpus: str, tmp_path: Path) -> None:
    [message] = alone[0].run(refusal, Case(family="gpt2").config(corpus, tmp_path))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8" in message
