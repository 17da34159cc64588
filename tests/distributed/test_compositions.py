"""Shared weights, residuals and gradient accumulation; vocabulary-parallel embedding and cross-entropy; dropout."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shiplap import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, destroy_all_env, init_all_env
from shiplap.dist.collectives import all_gather
from shiplap.layers.dropout import Dropout
from shiplap.tensor_parallel import IGNORE, vocab_parallel_cross_entropy
from shiplap.tensor_parallel.random import different_per_rank
from tests.cases import compositions
from tests.cases.models import gathered as whole_of
from tests.cases.switches import everything_on, topologies
from tests.distributed.ranks import RankPool


def chains(num_ranks: int) -> list[str]:
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    failures = [
        f"{config}, {times} times, {micro_batches} micro-batches: {failure}"
        for config in topologies(num_ranks)
        for times, micro_batches in ((1, 1), (2, 3))
        for failure in compositions.check(config, env.group("tp"), times=times, micro_batches=micro_batches)
    ]
    destroy_all_env()
    return failures


@pytest.mark.parametrize("num_ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_shared_weights_residuals_and_accumulation(ranks: Callable[[int], RankPool], num_ranks: int) -> None:
    for failures in ranks(num_ranks).run(chains, num_ranks):
        assert not failures, "\n".join(failures[:5])


def embed(num_ranks: int, sequence_parallel: bool, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    env = init_all_env(tensor_parallel_size=num_ranks, sequence_parallel=sequence_parallel, device="cpu")
    group = env.group("tp")
    torch.manual_seed(0)
    embedding = VocabParallelEmbedding(vocab_size, 6)
    tokens = torch.randint(vocab_size, (8, 3), generator=torch.Generator().manual_seed(1))
    y = embedding(tokens)
    scale = torch.arange(1.0, 9.0)[:, None, None]
    (y * (scale.chunk(num_ranks)[env.coordinate("tp")] if sequence_parallel else scale)).sum().backward()
    assert embedding.weight.grad is not None
    gathered = all_gather(y.detach(), group).wait() if sequence_parallel else y.detach()
    grad = whole_of(embedding.weight.grad, embedding.placements["weight"], group)
    destroy_all_env()
    return gathered, grad


@pytest.mark.parametrize("vocab_size", [16, 13, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_embedding_matches_the_whole_table(
    ranks: Callable[[int], RankPool], num_ranks: int, sequence_parallel: bool, vocab_size: int
) -> None:
    torch.manual_seed(0)
    table = torch.nn.init.normal_(torch.empty(vocab_size, 6), std=0.02).requires_grad_()
    tokens = torch.randint(vocab_size, (8, 3), generator=torch.Generator().manual_seed(1))
    expected = F.embedding(tokens, table)
    (expected * torch.arange(1.0, 9.0)[:, None, None]).sum().backward()
    for y, grad in ranks(num_ranks).run(embed, num_ranks, sequence_parallel, vocab_size):
        assert torch.equal(y, expected)
        assert torch.allclose(grad, table.grad)  # type: ignore[arg-type]


def cross_entropy(num_ranks: int, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    vocab_size = logits.shape[-1]
    # What pads the vocabulary must not matter, however large.
    padded = F.pad(logits, (0, -vocab_size % num_ranks), value=1e4)
    local = padded.chunk(num_ranks, dim=-1)[env.coordinate("tp")].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local, targets, vocab_size=vocab_size, group=env.group("tp"))
    (losses * torch.arange(losses.numel()).view_as(losses)).sum().backward()
    assert local.grad is not None
    grad = torch.cat(tuple(all_gather(local.grad[None], env.group("tp")).wait()), dim=-1)
    destroy_all_env()
    return losses.detach(), grad


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("vocab_size", [16, 11, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_cross_entropy_matches_the_whole_vocabulary(
    ranks: Callable[[int], RankPool], num_ranks: int, vocab_size: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 2, vocab_size, generator=generator) * scale
    targets = torch.randint(vocab_size, (5, 2), generator=generator)
    targets[2] = IGNORE
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(5, 2)
    (expected * torch.arange(10).view(5, 2)).sum().backward()
    assert whole.grad is not None
    for losses, grad in ranks(num_ranks).run(cross_entropy, num_ranks, logits, targets):
        assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(grad[..., :vocab_size].double(), whole.grad, rtol=1e-5, atol=1e-5)
        assert not grad[..., vocab_size:].any()


def draws() -> dict[str, torch.Tensor]:
    env = init_all_env(everything_on(2), device="cpu")
    torch.manual_seed(4)
    group, ones, cpu = env.group("tp"), torch.ones(256), torch.device("cpu")
    result = {
        "alike": Dropout(0.5, group=None)(ones),
        "own": Dropout(0.5, group=group)(ones),
        "own again": Dropout(0.5, group=group)(ones),
    }
    with different_per_rank(group, cpu):
        result["inside"] = torch.rand(4)
    result["after"] = torch.rand(4)
    destroy_all_env()
    return result


def test_dropout_is_alike_where_ranks_hold_the_same_and_different_where_not(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(draws)
    assert {name for name in first if torch.equal(first[name], second[name])} == {"alike", "after"}
    assert not torch.equal(first["own"], first["own again"])
    for mask in (first["alike"], first["own"], second["own"]):
        assert set(mask.unique().tolist()) == {0.0, 2.0}


def errors() -> list[str]:
    init_all_env(everything_on(2), device="cpu")
    messages = []
    for attempt in (
        lambda: ColumnParallelLinear(4, 7),
        lambda: RowParallelLinear(7, 4),
        lambda: RowParallelLinear(4, 4)(torch.ones(5, 1, 2)),
        lambda: ColumnParallelLinear(4, 4, weight=torch.nn.Parameter(torch.ones(2, 5))),
        lambda: ColumnParallelLinear(4, 8, config=everything_on(4)),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the messages are compared by the caller
            attempt()
        messages.append(str(refused.value))
    destroy_all_env()
    return messages


def test_layers_name_both_numbers(ranks: Callable[[int], RankPool]) -> None:
    for messages in ranks(2).run(errors):
        for message, numbers in zip(messages, ("7 2", "7 2", "5 2", "5 4", "2 4"), strict=True):
            assert all(number in message for number in numbers.split()), message


def copies() -> bool:
    init_all_env(everything_on(2), device="cpu")
    layer = ColumnParallelLinear(4, 4)
    x = torch.ones(2, 3, 4)
    copied = copy.deepcopy(layer)
    same = torch.equal(copied(x), layer(x)) and copied.weight is not layer.weight
    destroy_all_env()
    return same


def test_a_layer_can_be_copied(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(copies) == [True, True]
