"""The whole of GPT-2 against a plain float64 one: tied embeddings, padding, norms, recomputation, dropout."""

from collections.abc import Callable

import pytest
import torch

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from tests.cases import gpt2
from tests.cases.switches import everything_on
from tests.distributed.ranks import RankPool


def topology(num_ranks: int, name: str) -> ModelParallelConfig:
    if name == "overlap":
        return everything_on(num_ranks)
    return ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=name == "sequence_parallel")


def check(num_ranks: int, name: str, recompute: str, dtype: torch.dtype) -> list[str]:
    config = topology(num_ranks, name)
    env = init_all_env(config, device="cpu")
    failures = gpt2.check(config, env.group("tp"), recompute=recompute, dtype=dtype)
    destroy_all_env()
    return failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [(1, "tp"), *((n, name) for n in (2, 8) for name in ("tp", "sequence_parallel", "overlap"))],
)
def test_loss_logits_and_every_gradient_match_float64(
    ranks: Callable[[int], RankPool], *, num_ranks: int, name: str, recompute: str, dtype: torch.dtype
) -> None:
    for failures in ranks(num_ranks).run(check, num_ranks, name, recompute, dtype):
        assert not failures, "\n".join(failures)


def initial_weights(num_ranks: int) -> dict[str, torch.Tensor]:
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    torch.manual_seed(11)
    model = gpt2.build(env.config, env.group("tp"))
    weights = gpt2.full_parameters(model, env.group("tp"))
    destroy_all_env()
    return weights


def test_initial_weights_are_the_same_whatever_the_tp_size(ranks: Callable[[int], RankPool]) -> None:
    [alone] = ranks(1).run(initial_weights, 1)
    for weights in [*ranks(2).run(initial_weights, 2), *ranks(8).run(initial_weights, 8)]:
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)


def dropout_gradients(num_ranks: int, recompute: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = everything_on(num_ranks)
    env = init_all_env(config, device="cpu")
    model = gpt2.build(config, env.group("tp"), recompute=recompute, dropout=0.5)
    torch.manual_seed(3)
    loss = model(*gpt2.batch())
    loss.backward()
    gradients = gpt2.full_parameters(model, env.group("tp"), grads=True)
    destroy_all_env()
    return loss.detach(), gradients


def test_recomputed_dropout_drops_the_same(ranks: Callable[[int], RankPool]) -> None:
    kept_loss, kept = ranks(2).run(dropout_gradients, 2, "none")[0]
    for recompute in ("selective", "full"):
        for loss, gradients in ranks(2).run(dropout_gradients, 2, recompute):
            assert torch.equal(loss, kept_loss)
            assert all(torch.allclose(gradients[name], kept[name], rtol=1e-4, atol=1e-7) for name in kept)
