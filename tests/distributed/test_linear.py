"""The parallel linear layers against the unsharded float64 reference: the matrix of the verification document."""

from collections.abc import Callable

import pytest
import torch

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from tests.cases import linear
from tests.distributed.ranks import RankPool


def run_cases(num_ranks: int, dtype: torch.dtype, which: str, device: str = "cpu") -> tuple[int, list[str]]:
    """On one rank: all cases of `which`; how many there were, and what is wrong."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=num_ranks), device=device)
    try:
        cases = getattr(linear, which)(num_ranks, dtype, device)
        failures = [failure for case in cases for failure in linear.check(case, env.group("tp"))]
    finally:
        destroy_all_env()
    return len(cases), failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_methods_that_no_switch_chooses(ranks: Callable[[int], RankPool], num_ranks: int, dtype: torch.dtype) -> None:
    for num_cases, failures in ranks(num_ranks).run(run_cases, num_ranks, dtype, "replaced_plans"):
        assert num_cases > 20
        assert not failures, f"{len(failures)} of {num_cases}:\n" + "\n".join(failures[:5])


@pytest.mark.parametrize("which", ["matrix", "modes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_output_and_every_gradient_match_float64(
    ranks: Callable[[int], RankPool], num_ranks: int, dtype: torch.dtype, which: str
) -> None:
    for num_cases, failures in ranks(num_ranks).run(run_cases, num_ranks, dtype, which):
        assert num_cases > 20
        assert not failures, f"{len(failures)} of {num_cases}:\n" + "\n".join(failures[:5])
