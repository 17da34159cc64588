"""The parallel linear layers against the unsharded float64 reference: the matrix of the verification document."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, destroy_all_env, init_all_env
from shiplap.dist import collectives
from shiplap.overlap.registry import method
from shiplap.tensor_parallel.placement import Block, Split
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


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(pool: RankPool, dtype: torch.dtype, which: str) -> None:
    for num_cases, failures in pool.run(run_cases, pool.num_ranks, dtype, which):
        assert num_cases > 20
        assert not failures, f"{len(failures)} of {num_cases}:\n" + "\n".join(failures[:5])


@DTYPES
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_plan_matches_float64(ranks: Callable[[int], RankPool], num_ranks: int, dtype: torch.dtype) -> None:
    check(ranks(num_ranks), dtype, "every_kind")


@pytest.mark.full
@DTYPES
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_methods_that_no_switch_chooses(ranks: Callable[[int], RankPool], num_ranks: int, dtype: torch.dtype) -> None:
    check(ranks(num_ranks), dtype, "replaced_plans")


@pytest.mark.full
@pytest.mark.parametrize("which", ["matrix", "modes"])
@DTYPES
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_output_and_every_gradient_match_float64(
    ranks: Callable[[int], RankPool], num_ranks: int, dtype: torch.dtype, which: str
) -> None:
    check(ranks(num_ranks), dtype, which)


def delayed_cases(num_ranks: int, dtype: torch.dtype) -> tuple[int, list[str]]:
    """As `run_cases`, with every rank late by another moment at every communication."""
    random = Random(torch.distributed.get_rank())

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            time.sleep(random.random() * 2e-3)
            return function(*arguments, **options)

        return call

    with ExitStack() as patches:
        for owner, name in (
            (torch.distributed, "batch_isend_irecv"),
            (torch.distributed, "reduce"),
            (collectives, "_all_gather_single"),
            (collectives, "_reduce_scatter_single"),
        ):
            patches.enter_context(patch.object(owner, name, late(getattr(owner, name))))
        return run_cases(num_ranks, dtype, "replaced_plans")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_methods_match_float64_whoever_is_late(ranks: Callable[[int], RankPool], num_ranks: int) -> None:
    for num_cases, failures in ranks(num_ranks).run(delayed_cases, num_ranks, torch.float32):
        assert num_cases > 20
        assert not failures, f"{len(failures)} of {num_cases}:\n" + "\n".join(failures[:5])


def accumulated_in_parts() -> tuple[torch.Tensor, torch.Tensor]:
    """Of a bfloat16 layer some of whose rows both ranks hold: `main_grad` by a pipelined wgrad, and at once."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True), device="cpu")
    split = Split(blocks=(Block(size=4), Block(size=4, unit=4)))
    layer = ColumnParallelLinear(16, 8, False, split=split).bfloat16()
    generator = torch.Generator().manual_seed(env.rank)
    x, dy = (torch.randn(size, generator=generator).bfloat16() for size in ((6, 16), (12, 6)))
    grads = []
    for wgrad in ("ring", "sequential"):
        layer.plan = replace(layer.plan, wgrad=method(wgrad))
        layer.weight.main_grad = torch.zeros(layer.weight.shape)  # type: ignore[attr-defined]
        layer(x).backward(dy)
        grads.append(layer.weight.main_grad)  # type: ignore[attr-defined]
    destroy_all_env()
    return grads[0], grads[1]


def added_to_main_grad(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a Column and a Row layer: what a wgrad in parts, and at once, adds to a `main_grad` that is not empty."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True), device="cpu")
    generator = torch.Generator().manual_seed(env.rank)
    shard, whole = (torch.randn(size, generator=generator) for size in ((3, 2, 16), (6, 2, 4)))

    def main_grad(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, **plan: str) -> torch.Tensor:
        layer.plan = replace(layer.plan, **plan)  # type: ignore[type-var]
        grad = torch.ones(layer.weight.shape)  # type: ignore[arg-type]
        layer.weight.main_grad = grad  # type: ignore[union-attr]
        layer(x).backward(dy)
        return grad

    column, row = ColumnParallelLinear(16, 8), RowParallelLinear(8, 16)
    found = [
        (
            main_grad(column, shard, whole, wgrad=name),
            main_grad(column, shard, whole, wgrad="sequential"),
        ),
        (
            main_grad(row, whole, shard, dgrad=name, wgrad="parts"),
            main_grad(row, whole, shard, dgrad=name, wgrad="whole"),
        ),
    ]
    assert column.weight.grad is None
    assert row.weight.grad is None
    destroy_all_env()
    return found


@pytest.mark.parametrize("name", ["ring", "shards_per_gemm", "feature_chunks:2", "feature_chunks:2 own_first"])
def test_parts_of_a_gradient_are_added_to_what_is_there(ranks: Callable[[int], RankPool], name: str) -> None:
    for found in ranks(2).run(added_to_main_grad, name):
        for in_parts, at_once in found:
            torch.testing.assert_close(in_parts, at_once)
            assert (at_once - 1.0).abs().max() > 0.1


def test_parts_of_a_gradient_are_not_rounded_before_they_reach_main_grad(ranks: Callable[[int], RankPool]) -> None:
    for in_parts, at_once in ranks(2).run(accumulated_in_parts):
        torch.testing.assert_close(in_parts, at_once, rtol=2e-2, atol=2e-2)  # products of the CPU are bfloat16
        assert (in_parts != in_parts.bfloat16().float()).any()
