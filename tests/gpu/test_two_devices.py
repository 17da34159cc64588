"""The matrix over NCCL, one rank a device, on the default stream and on another one."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.cases import models
from tests.distributed import test_linear, test_lora, test_models
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


def on_stream(side: bool) -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if side else nullcontext()


def cases(dtype: torch.dtype, which: str, side: bool) -> tuple[int, list[str]]:
    torch.cuda.set_device(torch.distributed.get_rank())
    with on_stream(side):
        return test_linear.run_cases(2, dtype, which, device="cuda")


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("which", ["matrix", "modes", "replaced_plans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_every_gradient_match_float64(pair: RankPool, dtype: torch.dtype, which: str, side: bool) -> None:
    for num_cases, failures in pair.run(cases, dtype, which, side):
        assert num_cases > 20
        assert not failures, f"{len(failures)} of {num_cases}:\n" + "\n".join(failures[:5])


def model(name: str, family: str, side: bool) -> list[str]:
    torch.cuda.set_device(torch.distributed.get_rank())
    with on_stream(side):
        return test_models.check(2, name, family, "none", device="cuda")


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("name", ["tp", "sequence_parallel", "overlap"])
@pytest.mark.parametrize("family", list(models.CONFIGS))
def test_models_match_float64(pair: RankPool, family: str, name: str, side: bool) -> None:
    for failures in pair.run(model, name, family, side):
        assert not failures, "\n".join(failures)


def adapters(name: str, family: str) -> list[str]:
    torch.cuda.set_device(torch.distributed.get_rank())
    return test_lora.check(2, name, family, ("all-linear",), device="cuda")


@pytest.mark.parametrize("name", ["tp", "sequence_parallel", "overlap"])
@pytest.mark.parametrize("family", ["gpt2", "llama3, 3 key-value heads"])
def test_adapters_match_float64(pair: RankPool, family: str, name: str) -> None:
    for failures in pair.run(adapters, name, family):
        assert not failures, "\n".join(failures)
