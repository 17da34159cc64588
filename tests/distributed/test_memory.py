"""What the layers keep between forward and backward, in bytes, and what outlives its call: nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, destroy_all_env, init_all_env
from tests.cases.memory import Storages, saved_for_backward
from tests.cases.switches import everything_on, topologies
from tests.distributed.ranks import RankPool

SEQUENCE, BATCH, INPUTS, OUTPUTS = 64, 2, 32, 48
FLOAT = 4


def keep(num_ranks: int, kind: str) -> list[tuple[ModelParallelConfig, dict[str, Any]]]:
    """For every sequence-parallel topology: what is saved, and which large storages live after forward and backward."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=num_ranks), device="cpu")
    results = []
    for config in topologies(num_ranks):
        if not config.sequence_parallel:
            continue
        layer: torch.nn.Module
        if kind == "column":
            layer = ColumnParallelLinear(INPUTS, OUTPUTS, config=config, group=env.group("tp"))
            x = torch.randn(SEQUENCE // num_ranks, BATCH, INPUTS, requires_grad=True)
        else:
            layer = RowParallelLinear(INPUTS, OUTPUTS, config=config, group=env.group("tp"))
            x = torch.randn(SEQUENCE, BATCH, INPUTS // num_ranks, requires_grad=True)
        # Anything as large as the whole sequence of this layer's narrower side.
        full_sequence = SEQUENCE * BATCH * (INPUTS if kind == "column" else INPUTS // num_ranks) * FLOAT
        with Storages() as storages, saved_for_backward(layer) as saved:
            y = layer(x)
        parameters = tuple(layer.parameters())
        after_forward = storages.alive(full_sequence, but=(x, y, *parameters))
        with storages:
            dy = torch.ones_like(y)
            y.backward(dy)
        assert x.grad is not None
        after_backward = storages.alive(full_sequence, but=(x, x.grad, y, dy, *parameters))
        results.append((config, {"saved": saved, "forward": after_forward, "backward": after_backward}))
    destroy_all_env()
    return results


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_keeps_its_shard_and_nothing_else(ranks: Callable[[int], RankPool], num_ranks: int, kind: str) -> None:
    # Column its sequence shard of x, Row its feature shard: the same number of bytes.
    shard = SEQUENCE * BATCH * INPUTS * FLOAT // num_ranks
    for results in ranks(num_ranks).run(keep, num_ranks, kind):
        assert any(config.tp_comm_overlap for config, _ in results)
        assert any(not config.tp_comm_overlap for config, _ in results)
        for config, kept in results:
            assert kept == {"saved": [shard], "forward": [], "backward": []}, config


def keep_under_no_grad(num_ranks: int) -> list[int]:
    env = init_all_env(everything_on(num_ranks), device="cpu")
    column = ColumnParallelLinear(INPUTS, OUTPUTS)
    row = RowParallelLinear(OUTPUTS, INPUTS)
    x = torch.randn(SEQUENCE // num_ranks, BATCH, INPUTS)
    with Storages() as storages, torch.no_grad():
        y = row(column(x))
    alive: list[int] = storages.alive(1, but=(x, y, *column.parameters(), *row.parameters()))
    assert env.group("tp") is not None
    destroy_all_env()
    return alive


def test_no_grad_keeps_nothing(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(keep_under_no_grad, 2) == [[], []]


def backward_of_a_frozen_layer(num_ranks: int, frozen: str) -> list[tuple[list[int], list[str]]]:
    """Bytes that a Column layer saves, and the communication of its backward, for every sequence-parallel topology."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=num_ranks), device="cpu")
    results = []
    for config in topologies(num_ranks):
        if not config.sequence_parallel:
            continue
        layer = ColumnParallelLinear(INPUTS, OUTPUTS, config=config, group=env.group("tp"))
        x = torch.randn(SEQUENCE // num_ranks, BATCH, INPUTS, requires_grad=frozen != "x")
        layer.weight.requires_grad_(frozen != "weight")
        with saved_for_backward(layer) as saved:
            y = layer(x)
        with Storages() as storages:
            y.sum().backward()
        results.append((saved, [call for call in storages.calls if "c10d" in call]))
    destroy_all_env()
    return results


def test_a_frozen_weight_keeps_no_input_and_gathers_none(ranks: Callable[[int], RankPool]) -> None:
    for results in ranks(2).run(backward_of_a_frozen_layer, 2, "weight"):
        for saved, communication in results:
            assert saved == []
            # The input's gradient is scattered, by whatever method; nothing is gathered.
            assert communication
            assert not any("gather" in call for call in communication), communication


def test_a_frozen_input_gets_no_gradient_and_scatters_none(ranks: Callable[[int], RankPool]) -> None:
    for results in ranks(2).run(backward_of_a_frozen_layer, 2, "x"):
        for _, communication in results:
            assert len(communication) == 1, communication
            assert "allgather" in communication[0]
