"""Whole models against plain float64 ones: tied embeddings, padding, norms, heads, recomputation, dropout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from shiplap import ColumnParallelLinear, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.lora import Adapters, add_adapters, find_targets
from shiplap.models.build import Stage
from shiplap.models.decoder import build_model
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.parallel import Recompute
from tests.cases import models
from tests.cases.switches import everything_on
from tests.distributed.ranks import RankPool

TOPOLOGIES = [
    (1, "tp"),
    *((2, name) for name in ("tp", "sequence_parallel", "overlap")),
    *((4, name) for name in ("tp", "overlap")),
    pytest.param(8, "overlap", marks=pytest.mark.full),
]


def topology(num_ranks: int, name: str) -> ModelParallelConfig:
    if name == "overlap":
        return everything_on(num_ranks)
    return ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=name == "sequence_parallel")


def check(num_ranks: int, name: str, family: str, recompute: Recompute, *, device: str = "cpu") -> list[str]:
    config = topology(num_ranks, name)
    env = init_all_env(config, device=device)
    failures = [
        f"{dtype}: {failure}"
        for dtype in models.dtypes(family)
        for failure in models.check(family, config, env.group("tp"), recompute=recompute, dtype=dtype, device=device)
    ]
    destroy_all_env()
    return failures


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *(("gpt2", recompute) for recompute in ("none", "selective", "full")),
        *(("llama3", recompute) for recompute in ("none", "full")),
        ("qwen3", "selective"),
        *(("mixtral", recompute) for recompute in ("none", "full")),
        ("mixtral, all experts", "none"),
        *((f"llama3, {heads} key-value heads", "none") for heads in (1, 2, 3)),
    ],
)
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    TOPOLOGIES,
)
def test_loss_logits_and_every_gradient_match_float64(
    ranks: Callable[[int], RankPool], *, num_ranks: int, name: str, family: str, recompute: Recompute
) -> None:
    for failures in ranks(num_ranks).run(check, num_ranks, name, family, recompute):
        assert not failures, "\n".join(failures)


def initial_weights(num_ranks: int, family: str) -> dict[str, torch.Tensor]:
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    torch.manual_seed(env.rank)  # nothing is drawn from the default generator
    config = models.CONFIGS[family]
    model = build_model(family.split(",")[0], config, parallel=env.config, group=env.group("tp"), seed=11)
    targets = find_targets(family.split(",")[0], config, ["attention.qkv", "attention.proj"])
    add_adapters(model, Adapters(targets=tuple(targets), rank=2, alpha=1.0), seed=11)
    weights = models.full_parameters(model, env.group("tp"))
    destroy_all_env()
    return weights


@pytest.mark.parametrize("family", list(models.CONFIGS))
def test_initial_weights_are_the_same_whatever_the_tp_size(ranks: Callable[[int], RankPool], family: str) -> None:
    [alone] = ranks(1).run(initial_weights, 1, family)
    for weights in [*ranks(2).run(initial_weights, 2, family), *ranks(4).run(initial_weights, 4, family)]:
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)


def stages(num_ranks: int, family: str) -> list[str]:
    """What differs between a model and the same one in three pieces: loss, gradients, initial weights."""
    config = topology(num_ranks, "overlap" if num_ranks > 1 else "tp")
    env = init_all_env(config, device="cpu")
    sizes = replace(models.CONFIGS[family], num_layers=3)
    build = partial(build_model, family, sizes, parallel=config, group=env.group("tp"), seed=3)
    whole = build()
    pieces = [
        build(stage=Stage(blocks=range(1), has_embedding=True, has_head=False)),
        build(stage=Stage(blocks=range(1, 2), has_embedding=False, has_head=False)),
        build(stage=Stage(blocks=range(2, 3), has_embedding=False, has_head=True)),
    ]
    tokens, targets = models.batch()
    expected = whole(tokens, targets)
    expected.backward()
    hidden = pieces[0].embed(tokens)
    for piece in pieces:
        hidden = piece.through_blocks(hidden)
    loss = pieces[-1].head_of(hidden, targets)
    loss.backward()
    found: dict[str, list[torch.nn.Parameter]] = {}
    for piece in pieces:
        for name, parameter in piece.named_parameters():
            found.setdefault(name, []).append(parameter)
    failures = [] if torch.equal(loss, expected) else [f"loss {loss} is not {expected}"]
    for name, parameter in whole.named_parameters():
        held = found.pop(name, [])
        failures += [] if held and all(torch.equal(one, parameter) for one in held) else [f"{name} is drawn otherwise"]
        # A tied table at both ends: each end has a part of its gradient.
        gradient = sum(one.grad for one in held if one.grad is not None)
        if not torch.allclose(torch.as_tensor(gradient), torch.as_tensor(parameter.grad), rtol=1e-5, atol=1e-8):
            failures.append(f"gradient of {name}")
    destroy_all_env()
    return failures + [f"{name} is in no whole model" for name in found]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "mixtral"])
def test_a_model_in_pieces_computes_what_it_does_in_one(
    ranks: Callable[[int], RankPool], family: str, num_ranks: int
) -> None:
    assert ranks(num_ranks).run(stages, num_ranks, family) == [[]] * num_ranks


def dropout_gradients(num_ranks: int, recompute: Recompute) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = everything_on(num_ranks)
    env = init_all_env(config, device="cpu")
    model = models.build("gpt2", config, env.group("tp"), recompute=recompute, dropout=0.5)
    torch.manual_seed(3)
    loss = model(*models.batch())
    loss.backward()
    gradients = models.full_parameters(model, env.group("tp"), grads=True)
    destroy_all_env()
    return loss.detach(), gradients


def test_recomputed_dropout_drops_the_same(ranks: Callable[[int], RankPool]) -> None:
    kept_loss, kept = ranks(2).run(dropout_gradients, 2, "none")[0]
    for recompute in ("selective", "full"):
        for loss, gradients in ranks(2).run(dropout_gradients, 2, recompute):
            assert torch.equal(loss, kept_loss)
            assert all(torch.allclose(gradients[name], kept[name], rtol=1e-4, atol=1e-7) for name in kept)


def pipelines(family: str, disable_qkv: bool, disable_fc1: bool) -> dict[str, set[tuple[str, str]]]:
    """Of each kind of column layer how its forward gather and its dgrad are done."""
    parallel = replace(
        everything_on(2), tp_comm_overlap_disable_qkv=disable_qkv, tp_comm_overlap_disable_fc1=disable_fc1
    )
    env = init_all_env(parallel, device="cpu")
    model = models.build(family, parallel, env.group("tp"))
    found: dict[str, set[tuple[str, str]]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear):
            assert str(layer.plan.wgrad) == "bulk"
            found.setdefault(name.split(".")[-1], set()).add((str(layer.plan.forward), str(layer.plan.dgrad)))
    destroy_all_env()
    return found


@pytest.mark.parametrize("disable_fc1", [False, True])
@pytest.mark.parametrize("disable_qkv", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3", "mixtral"])
def test_the_disable_options_reach_their_layers_in_every_family(
    ranks: Callable[[int], RankPool], *, family: str, disable_qkv: bool, disable_fc1: bool
) -> None:
    on, off = {("ring", "p2p")}, {("sequential", "bulk")}
    for found in ranks(2).run(pipelines, family, disable_qkv, disable_fc1):
        expected = {"qkv": off if disable_qkv else on, "fc1": off if disable_fc1 else on, "projection": on}
        assert found == expected


UNUSUAL = {
    "chunks": (
        ColumnPlan(forward="ring:3", dgrad="p2p:2", wgrad="ring:2"),
        RowPlan(forward="p2p:3", dgrad="ring:2"),
    ),
    "groups": (
        ColumnPlan(forward="shards_per_gemm", dgrad="bulk", wgrad="shards_per_gemm"),
        RowPlan(forward="reduce", dgrad="shards_per_gemm"),
    ),
    "row_chunks": (
        ColumnPlan(forward="ring", dgrad="row_chunks", wgrad="bulk_p2p"),
        RowPlan(forward="row_chunks:1,1", dgrad="shards_per_gemm:2,2"),
    ),
    "feature_chunks": (
        ColumnPlan(forward="feature_chunks", dgrad="feature_chunks:2", wgrad="feature_chunks"),
        RowPlan(forward="feature_chunks:2", dgrad="feature_chunks", wgrad="parts"),
    ),
    "feature_chunks own_first": (
        ColumnPlan(
            forward="feature_chunks own_first", dgrad="feature_chunks own_first", wgrad="feature_chunks own_first"
        ),
        RowPlan(forward="feature_chunks own_first", dgrad="feature_chunks own_first", wgrad="parts"),
    ),
    "kept": (
        ColumnPlan(forward="shards_per_gemm", dgrad="p2p", keeps="gathered"),
        RowPlan(forward="bulk", dgrad="ring"),
    ),
}


@contextmanager
def unusual_plans(name: str) -> Iterator[None]:
    """Layers that are made inside have these plans."""
    column, row = UNUSUAL[name]
    with (
        patch("shiplap.tensor_parallel.linear.column_plan", lambda *_, **__: column),
        patch("shiplap.tensor_parallel.linear.row_plan", lambda *_: row),
    ):
        yield


def check_plans(num_ranks: int, family: str, name: str) -> list[str]:
    with unusual_plans(name):
        return check(num_ranks, "overlap", family, "none")


@pytest.mark.parametrize("name", list(UNUSUAL))
@pytest.mark.parametrize("family", ["gpt2", "llama3, 3 key-value heads", "mixtral", "mixtral, all experts"])
def test_whole_models_are_right_under_every_method(ranks: Callable[[int], RankPool], *, family: str, name: str) -> None:
    for failures in ranks(4).run(check_plans, 4, family, name):
        assert not failures, "\n".join(failures)
