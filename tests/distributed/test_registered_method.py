"""A method that stands in no file of ours: everything that lists methods has it, and it trains right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shiplap import ColumnParallelLinear, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import ModelOptions, TrainConfig
from shiplap.dist.collectives import all_gather
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.overlap import registry
from shiplap.overlap.primitives import Consume, Kind, Method
from shiplap.tools.verify.plans import column_plans, row_plans
from shiplap.train.setup import resolve_structure
from shiplap.tuning.candidates import candidates
from tests.distributed.ranks import RankPool

OVERLAP = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)


def backwards(x_sBH: Tensor, consume: Consume, *, group: Any, method: Method) -> Tensor:
    """The last rows first."""
    x_SBH = all_gather(x_sBH, group).wait()
    half = len(x_SBH) // 2
    for rows in (slice(half, len(x_SBH)), slice(0, half)):
        consume(rows, x_SBH[rows])
    return x_SBH


TOY: Kind = Kind(
    name="toy",
    cut="by rows",
    transport="collective",
    summary="the last rows first",
    gather=backwards,
    candidates=lambda where, num_ranks: [TOY.method()] if where == "gather" else (),
)


def test_whatever_lists_methods_has_it() -> None:
    config = TrainConfig(parallel=OVERLAP, model=ModelOptions(num_layers=1, hidden_size=32, num_attention_heads=4))
    sizes, adapters = resolve_structure("gpt2", config)
    model = skeleton("gpt2", config, model=sizes, adapters=adapters)
    layers = {layer.path: layer for layer in parallel_layers(model)}
    fc1 = layers["blocks.0.mlp.fc1"]
    assert "toy" not in candidates(fc1, "forward", OVERLAP)
    with registry.registered(TOY):
        assert "toy" in candidates(fc1, "forward", OVERLAP)
        assert "toy" in candidates(layers["blocks.0.mlp.fc2"], "backward", OVERLAP)
        assert "| `toy` | gather | by rows | collective | the last rows first |" in registry.markdown_table()
        named = [*column_plans(2, quick=False), *row_plans(2, quick=False)]
        assert [name for name in named if "toy" in name], named
        fc1.module.plan = replace(fc1.module.plan, forward=registry.method("toy"))
        (site,) = (one for one in sites_of_run(model, config) if str(one.method) == "toy")
        assert (site.hidden_behind, site.reason) == ("forward", None)
    assert "toy" not in registry.markdown_table()


def off_by() -> float:
    """What a step by the toy is away from a sequential one: output, dx and dW."""
    env = init_all_env(OVERLAP, device="cpu")
    layer = ColumnParallelLinear(16, 8)
    generator = torch.Generator().manual_seed(env.rank)
    x, dy = (torch.randn(size, generator=generator) for size in ((3, 2, 16), (6, 2, 4)))
    found = []
    with registry.registered(TOY):
        for name in ("toy", "sequential"):
            layer.plan = replace(layer.plan, forward=registry.method(name), wgrad=registry.method(name))
            given = x.clone().requires_grad_()
            y = layer(given)
            found.append([y, *torch.autograd.grad(y, [given, layer.weight], dy)])
    destroy_all_env()
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(*found, strict=True))


def test_it_trains_right(ranks: Callable[[int], RankPool]) -> None:
    assert max(ranks(2).run(off_by)) < 1e-6
