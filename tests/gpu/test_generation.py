"""Writing on CUDA: the cache changes nothing, and two devices write what one does."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.generation import generate
from shiplap.generation.options import SamplingOptions
from tests.cases import models
from tests.distributed.ranks import RankPool
from tests.distributed.test_generation import cache_errors


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


def close_enough(errors: dict[str, float], dtype: torch.dtype) -> bool:
    """The limits are those of `tests.distributed.test_generation`."""
    return max(errors.values()) < (5e-6 if dtype == torch.float32 else 8e-2)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in models.CONFIGS for dtype in models.dtypes(name)])
def test_logits_with_a_cache_are_those_without(name: str, dtype: torch.dtype) -> None:
    errors = cache_errors(ModelParallelConfig(), name, dtype, device="cuda")
    assert close_enough(errors, dtype), errors


def errors_on_a_rank(config: ModelParallelConfig, name: str, dtype: torch.dtype) -> dict[str, float]:
    torch.cuda.set_device(dist.get_rank())
    return cache_errors(config, name, dtype, device="cuda")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in models.CONFIGS for dtype in models.dtypes(name)])
def test_so_they_are_on_two_devices(pair: RankPool, *, name: str, dtype: torch.dtype, sequence_parallel: bool) -> None:
    config = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence_parallel)
    for errors in pair.run(errors_on_a_rank, config, name, dtype):
        assert close_enough(errors, dtype), errors


def written(num_ranks: int, name: str) -> list[list[int | None]]:
    """Two texts of 40 tokens; the model's context of 16 is begun anew several times."""
    if num_ranks > 1:
        torch.cuda.set_device(dist.get_rank())
    env = init_all_env(tensor_parallel_size=num_ranks, device="cuda")
    model = models.build(name, env.config, env.group("tp")).to(env.device).eval()
    steps = generate(
        model,
        torch.tensor([[1, 2, 3]]),
        num_tokens=40,
        max_sequence_length=16,
        sampling=SamplingOptions(top_p=0.9),
        num_samples=2,
        group=env.group("tp"),
    )
    tokens = list(steps)
    destroy_all_env()
    return tokens


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral", "llama3, 3 key-value heads"])
def test_two_devices_write_what_one_does(pair: RankPool, name: str) -> None:
    alone = written(1, name)
    assert len(alone) == 40
    assert pair.run(written, 2, name) == [alone, alone]
