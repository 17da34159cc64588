"""Adapters under tensor and sequence parallelism: gradients, what is communicated and computed, merging, dropout."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, destroy_all_env, init_all_env
from shiplap.dist.collectives import rank_in
from shiplap.dist.mappings import reduce_from_all
from shiplap.lora import merge, merged, remove_adapters
from shiplap.tensor_parallel.low_rank import LowRankAdapter
from shiplap.tensor_parallel.parameters import draw_by_name
from shiplap.tensor_parallel.placement import TP
from tests.cases import lora, models
from tests.cases.lora import RANK
from tests.cases.memory import Storages
from tests.cases.switches import everything_on
from tests.distributed.ranks import RankPool
from tests.distributed.test_models import TOPOLOGIES, topology, unusual_plans

LLAMA_PARTS = ("q_proj", "v_proj", "o_proj", "up_proj", "mlp.fc2")


def check(num_ranks: int, name: str, model: str, targets: tuple[str, ...], *, device: str = "cpu") -> list[str]:
    config = topology(num_ranks, name)
    env = init_all_env(config, device=device)
    failures = [
        failure
        for dtype in (torch.float32, torch.bfloat16)
        for failure in lora.check(model, config, env.group("tp"), targets=targets, dtype=dtype, device=device)
    ]
    destroy_all_env()
    return failures


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("gpt2", ("all-linear",)),
        ("llama3", ("all-linear",)),
        ("llama3", LLAMA_PARTS),
        ("llama3, 3 key-value heads", LLAMA_PARTS),
        ("llama3, 1 key-value heads", ("k_proj",)),
        ("qwen3", ("attention.qkv", "gate_proj")),
        ("mixtral, all experts", ("all-linear",)),
    ],
)
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    TOPOLOGIES,
)
def test_outputs_and_every_factors_gradient_match_float64(
    ranks: Callable[[int], RankPool], *, num_ranks: int, name: str, model: str, targets: tuple[str, ...]
) -> None:
    for failures in ranks(num_ranks).run(check, num_ranks, name, model, targets):
        assert not failures, "\n".join(failures)


def check_plans(num_ranks: int, name: str, model: str, targets: tuple[str, ...]) -> list[str]:
    with unusual_plans(name):
        return check(num_ranks, "overlap", model, targets)


@pytest.mark.parametrize("name", ["row_chunks", "feature_chunks", "feature_chunks own_first"])
@pytest.mark.parametrize(("model", "targets"), [("gpt2", ("all-linear",)), ("llama3", LLAMA_PARTS)])
def test_an_adapters_rows_and_columns_are_cut_as_its_layers_are(
    ranks: Callable[[int], RankPool], *, name: str, model: str, targets: tuple[str, ...]
) -> None:
    for failures in ranks(4).run(check_plans, 4, name, model, targets):
        assert not failures, "\n".join(failures)


SEQUENCE, BATCH, INPUTS, OUTPUTS = 16, 2, 24, 40
Layer = ColumnParallelLinear | RowParallelLinear


def adapted(kind: str, config: ModelParallelConfig, *, dropout: float = 0.0) -> tuple[Layer, torch.Tensor]:
    """A frozen layer with an adapter that does something, and this rank's input, which needs a gradient."""
    env = init_all_env(config, device="cpu")
    torch.manual_seed(3)
    column = kind == "column"
    layer: Layer
    if column:
        layer = ColumnParallelLinear(INPUTS, OUTPUTS, config=config, disable_tp_comm_pipeline=True)
    else:
        layer = RowParallelLinear(INPUTS, OUTPUTS, config=config)
    layer.requires_grad_(False)
    adapter = LowRankAdapter(layer, rank=RANK, scale=0.5, dropout=dropout)
    draw_by_name(adapter, seed=0, group=layer.group)
    layer.adapter = adapter
    with torch.no_grad():
        shape = (OUTPUTS, RANK)
        full = torch.randn(shape)
        layer.adapter.up.copy_(full.chunk(env.layout.size("tp"))[env.coordinate("tp")] if column else full)
    x = torch.randn(SEQUENCE, BATCH, INPUTS)
    if column and config.sequence_parallel:
        x = x.chunk(env.layout.size("tp"))[env.coordinate("tp")]
    if not column:
        x = x.chunk(env.layout.size("tp"), dim=-1)[env.coordinate("tp")]
    return layer, x.clone().requires_grad_()


def collectives(kind: str, with_adapter: bool, overlap: bool) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    """What is communicated forward and backward, and the shapes of all products of backward."""
    config = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=overlap)
    layer, x = adapted(kind, config)
    if not with_adapter:
        layer.adapter = None
    with Storages() as forward:
        y = layer(x)
    assert isinstance(y, torch.Tensor)
    with Storages() as backward:
        y.sum().backward()
    destroy_all_env()
    names = [[call.split(".")[1] for call in mode.calls if call.startswith("c10d.")] for mode in (forward, backward)]
    return names[0], names[1], [shape for call, shape in backward.results if "mm" in call]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_an_adapter_shares_its_layers_communication_and_costs_no_wgrad(
    ranks: Callable[[int], RankPool], *, kind: str, overlap: bool
) -> None:
    [(forward, backward, products), _] = ranks(2).run(collectives, kind, True, overlap)
    [(plain_forward, plain_backward, _), _] = ranks(2).run(collectives, kind, False, overlap)
    # The column layer here is denied its pipelines; bulk overlap is the same collective at another time.
    pipeline = ["recv_", "send"]
    assert forward == plain_forward
    assert forward == {"column": ["_allgather_base_"], "row": pipeline if overlap else ["_reduce_scatter_base_"]}[kind]
    # One more: the sum of the gradient of the factor that every rank holds. Nothing is gathered in Column backward.
    assert backward == [*plain_backward, "allreduce_"]
    expected = {"column": ["_reduce_scatter_base_"], "row": pipeline if overlap else ["_allgather_base_"]}
    assert plain_backward == expected[kind]
    weight = {"column": (OUTPUTS // 2, INPUTS), "row": (OUTPUTS, INPUTS // 2)}[kind]
    assert weight not in products
    assert products


def slopes(kind: str, config: ModelParallelConfig) -> list[tuple[float, float]]:
    """For each factor the change of a linear function of the output, measured, and as the gradient says."""
    layer, x = adapted(kind, config, dropout=0.5)
    assert isinstance(layer.adapter, LowRankAdapter)
    group = layer.group

    # A column layer's ranks each have some outputs, and under sequence parallelism a row layer's some tokens.
    alike = kind == "row" and not config.sequence_parallel

    def loss() -> torch.Tensor:
        torch.manual_seed(8)
        y = layer(x)
        assert isinstance(y, torch.Tensor)
        seed = 0 if alike else rank_in(group)
        total = (y * torch.randn(y.shape[0], 1, 1, generator=torch.Generator().manual_seed(seed))).sum()
        return total if alike else reduce_from_all(total, group)

    results = []
    loss().backward()
    for name, factor in layer.adapter.named_parameters():
        divided = TP in layer.adapter.placements[name].splits
        step = torch.randn(factor.shape, generator=torch.Generator().manual_seed(rank_in(group) if divided else 5))
        assert factor.grad is not None
        slope = (factor.grad * step).sum()
        slope = reduce_from_all(slope, group) if divided else slope
        with torch.no_grad():
            factor.add_(step)
            higher = loss()
            factor.sub_(2 * step)
            lower = loss()
            factor.add_(step)
        results.append((float(higher - lower) / 2, float(slope)))
    destroy_all_env()
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_gradients_are_right_under_dropout(
    ranks: Callable[[int], RankPool], kind: str, *, sequence_parallel: bool
) -> None:
    config = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence_parallel)
    for results in ranks(2).run(slopes, kind, config):
        for measured, expected in results:
            assert measured == pytest.approx(expected, rel=1e-4)


def merge_and_unmerge(num_ranks: int, model: str) -> list[str]:
    config = replace(everything_on(num_ranks), tp_comm_overlap_disable_qkv=True)
    env = init_all_env(config, device="cpu")
    shard = lora.build(model, config, env.group("tp"), targets=("all-linear",))
    tokens, _ = models.batch()
    problems = []
    with torch.no_grad():
        before = {name: parameter.clone() for name, parameter in shard.named_parameters()}
        adapted_logits = shard(tokens)
        with merged(shard):
            if not torch.allclose(shard(tokens), adapted_logits, rtol=1e-4, atol=1e-4):
                problems.append("merged logits differ")
        if not all(torch.equal(before[name], parameter) for name, parameter in shard.named_parameters()):
            problems.append("unmerged weights differ")
        merge(shard)
        remove_adapters(shard)
        if not torch.allclose(shard(tokens), adapted_logits, rtol=1e-4, atol=1e-4):
            problems.append("logits differ once the adapters are gone")
        if any(".adapter." in name for name, _ in shard.named_parameters()):
            problems.append("adapters are still there")
    for name, layer in shard.named_modules():
        if name.endswith(".qkv") and not layer.disable_tp_comm_pipeline:
            problems.append(f"{name} lost its flag")
    destroy_all_env()
    return problems


@pytest.mark.parametrize("model", ["gpt2", "llama3, 3 key-value heads"])
def test_merging_changes_no_logits_and_unmerging_restores_every_bit(
    ranks: Callable[[int], RankPool], model: str
) -> None:
    for problems in ranks(4).run(merge_and_unmerge, 4, model):
        assert not problems
