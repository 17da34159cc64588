"""The same run under every topology: 20 float32 steps on real text agree to 1e-4."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import DataOptions, OptimizerOptions
from shiplap.data import open_data
from shiplap.dist.hooks import ExposedTime
from shiplap.families import preset
from shiplap.models.decoder import build_model
from shiplap.optim import build_adamw
from shiplap.train.step import TrainStep
from tests.cases.switches import everything_on
from tests.distributed.ranks import RankPool

STEPS = 20
# A sequence length that TP does not divide; two micro-batches a step.
DATA = DataOptions(batch_size=4, sequence_length=61, total_batch_size=4 * 61 * 2)
TOPOLOGIES = {
    "TP 2": ModelParallelConfig(tensor_parallel_size=2),
    "TP 2 + SP": ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "TP 2 + SP + every overlap": everything_on(2),
    "TP 4": ModelParallelConfig(tensor_parallel_size=4),
    "TP 4 + SP + every overlap": everything_on(4),
}


# Ranks share key-value heads of the second, whose gradients are summed but counted once by clipping.
MODELS = {
    "gpt2": preset("gpt2", "gpt2-debug"),
    "llama3": replace(
        preset("llama3", "llama3-debug"), num_layers=2, num_attention_heads=12, num_key_value_heads=3, head_dim=16
    ),
}


def losses(family: str, config: ModelParallelConfig) -> list[float]:
    """The train losses of all steps, on one rank."""
    env = init_all_env(config, device="cpu")
    sizes = MODELS[family]
    model = build_model(family, sizes, parallel=config, group=env.group("tp"), seed=1234)
    data = open_data(
        DATA, vocab_size=sizes.vocab_size, data_parallel_rank=0, data_parallel_size=1, seed=1, validation=False
    )
    options = OptimizerOptions(num_iteration=STEPS, learning_rate=2e-3, warmup_iteration=5)
    step = TrainStep(
        model=model,
        replica=model,
        optimizer=build_adamw(model, options, fused=False),
        options=options,
        dtype="float32",
        balance_coefficient=0.0,
        env=env,
        exposed=ExposedTime(env.device),
    )
    curve = [step(i, [data.batches.train_batch(i, micro) for micro in range(2)]).loss for i in range(STEPS)]
    destroy_all_env()
    return curve


@pytest.fixture(scope="module")
def references(ranks: Callable[[int], RankPool]) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {
        family: ranks(1).run(losses, family, ModelParallelConfig())[0] for family in MODELS
    }
    for curve in curves.values():
        assert curve[-1] < 0.75 * curve[0], curve
    return curves


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *(pytest.param("gpt2", config, id=f"gpt2, {name}") for name, config in TOPOLOGIES.items()),
        *(
            pytest.param("llama3", TOPOLOGIES[name], id=f"llama3, {name}")
            for name in ("TP 2 + SP", "TP 4", "TP 4 + SP + every overlap")
        ),
    ],
)
def test_loss_curves_agree(
    ranks: Callable[[int], RankPool], references: dict[str, list[float]], family: str, config: ModelParallelConfig
) -> None:
    for curve in ranks(config.tensor_parallel_size).run(losses, family, config):
        assert curve == pytest.approx(references[family], rel=1e-4)
