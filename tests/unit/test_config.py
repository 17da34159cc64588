"""What the configuration refuses, and how it says so."""

import dataclasses

import pytest

from shiplap.config import (
    DataOptions,
    ModelOptions,
    ModelParallelConfig,
    OptimizerOptions,
    RunOptions,
    TrainConfig,
    TransformerConfig,
    UserError,
)
from shiplap.config.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"sequence_parallel": True}, ["--sequence-parallel", "--tensor-parallel", "got 1"]),
        ({"tensor_parallel_size": 2, "tp_comm_overlap": True}, ["--tp-comm-overlap", "--sequence-parallel"]),
        ({"tensor_parallel_size": 0}, ["--tensor-parallel", "0"]),
        ({"pipeline_parallel_size": -1}, ["--pipeline-parallel", "-1"]),
        ({"virtual_pipeline_parallel_size": 2}, ["--virtual-pipeline-parallel 2", "--pipeline-parallel"]),
    ],
)
def test_topology_that_cannot_work_is_refused_by_its_flag(sizes: dict[str, int], named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        ModelParallelConfig(**sizes)  # type: ignore[arg-type]
    assert all(part in str(refused.value) for part in named), refused.value


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (lambda: DataOptions(batch_size=0), ["--batch-size", "1", "0"]),
        (lambda: DataOptions(validation_fraction=1.0), ["--validation-fraction", "1.0"]),
        (lambda: DataOptions(input_bin="a.bin", data=("b.txt",)), ["--input-bin a.bin", "--data b.txt"]),
        (lambda: DataOptions(data=()), ["--data"]),
        (lambda: OptimizerOptions(num_iteration=0), ["--num-iteration", "0"]),
        (lambda: OptimizerOptions(learning_rate=-1.0), ["--learning-rate", "-1.0"]),
        (lambda: OptimizerOptions(adam_beta2=1.0), ["--adam-beta2", "1.0"]),
        (lambda: RunOptions(nproc=0), ["--nproc", "0"]),
        (lambda: ModelOptions(preset="gpt5").resolve("gpt2"), ["--preset gpt5", "gpt2-124m"]),
        (lambda: ModelOptions(hidden_size=100).resolve("gpt2"), ["--hidden-size 100", "--num-attention-heads 8"]),
        (lambda: ModelOptions(dropout=1.0).resolve("gpt2"), ["--dropout", "1.0"]),
        (lambda: ModelOptions(num_layers=0).resolve("gpt2"), ["--num-layers", "0"]),
    ],
)
def test_options_that_cannot_work_are_refused_by_their_flag(options: object, named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        options()  # type: ignore[operator]
    assert all(part in str(refused.value) for part in named), refused.value


@pytest.mark.parametrize(
    ("override", "flag"),
    [
        ({"num_attention_heads": 3, "hidden_size": 48}, "--num-attention-heads 3"),
        ({"num_attention_heads": 3, "hidden_size": 51}, "--hidden-size 51"),
        ({"num_attention_heads": 2, "hidden_size": 50, "ffn_hidden_size": 7}, "--ffn-hidden-size 7"),
    ],
)
def test_a_model_that_tp_does_not_divide_is_refused_with_both_numbers(override: dict[str, int], flag: str) -> None:
    model = ModelOptions(**override).resolve("gpt2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{flag} is not divisible by --tensor-parallel 2"):
        model.check_divisible_by(2)


def test_the_total_batch_is_reached_by_accumulation_or_refused() -> None:
    data = DataOptions(batch_size=4, sequence_length=32, total_batch_size=4 * 32 * 6)
    assert data.num_micro_batches(data_parallel_size=2) == 3
    with pytest.raises(UserError, match=r"--total-batch-size 768 is not a multiple of .* 4 × 32 × 4 = 512"):
        data.num_micro_batches(data_parallel_size=4)
    assert DataOptions().num_micro_batches(data_parallel_size=8) == 1


def test_overrides_change_the_preset_and_nothing_else() -> None:
    model = ModelOptions(preset="gpt2-124m", num_layers=2, dropout=0.1).resolve("gpt2")
    assert model == dataclasses.replace(preset("gpt2", "gpt2-124m"), num_layers=2, dropout=0.1)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Radford et al. 2019, table 2, as corrected with the released checkpoints.
    [("gpt2-124m", 124e6), ("gpt2-355m", 355e6), ("gpt2-774m", 774e6), ("gpt2-1.5b", 1558e6)],
)
def test_presets_have_the_published_sizes(name: str, parameters: float) -> None:
    model = preset("gpt2", name)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + hidden + ffn + 4 * hidden
    total = (model.vocab_size + model.max_sequence_length) * hidden + model.num_layers * block + 2 * hidden
    assert total == pytest.approx(parameters, rel=0.01)


def test_every_option_says_what_it_is_for() -> None:
    for group in (ModelParallelConfig, ModelOptions, DataOptions, OptimizerOptions, RunOptions):
        for field in dataclasses.fields(group):
            assert field.metadata["help"].endswith("."), f"{group.__name__}.{field.name}"


def test_configs_are_frozen_and_keyword_only() -> None:
    for config in (ModelParallelConfig(), TrainConfig(), PRESETS["gpt2"]["gpt2-debug"]()):
        assert isinstance(config, ModelParallelConfig | TrainConfig | TransformerConfig)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.seed = 1  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        ModelParallelConfig(2)  # type: ignore[call-arg]
