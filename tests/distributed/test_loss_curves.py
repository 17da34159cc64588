"""The same run under every topology: 20 float32 steps on real text agree to 1e-4."""

from collections.abc import Callable

import pytest
import torch

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import DataOptions, OptimizerOptions
from shiplap.config.presets import preset
from shiplap.data import open_data
from shiplap.models.registry import build_model
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


def losses(config: ModelParallelConfig) -> list[float]:
    """The train losses of all steps, on one rank."""
    env = init_all_env(config, device="cpu")
    torch.manual_seed(1234)
    sizes = preset("gpt2", "gpt2-debug")
    model = build_model("gpt2", sizes, parallel=config, group=env.group("tp"))
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
        env=env,
    )
    curve = [step(i, [data.batches.train_batch(i, micro) for micro in range(2)])[0] for i in range(STEPS)]
    destroy_all_env()
    return curve


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], RankPool]) -> list[float]:
    curve: list[float] = ranks(1).run(losses, ModelParallelConfig())[0]
    assert curve[-1] < 0.75 * curve[0], curve
    return curve


@pytest.mark.parametrize("config", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_loss_curves_agree(
    ranks: Callable[[int], RankPool], reference: list[float], config: ModelParallelConfig
) -> None:
    for curve in ranks(config.tensor_parallel_size).run(losses, config):
        assert curve == pytest.approx(reference, rel=1e-4)
