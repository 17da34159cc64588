"""What the configuration refuses, and how it says so."""

import dataclasses

import pytest

from shiplap.checkpoint.sizes import sizes_of_run
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
from shiplap.families import preset


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
        (lambda: sizes_of_run(ModelOptions(preset="gpt5"), "gpt2"), ["--preset gpt5", "gpt2-124m"]),
        (lambda: sizes_of_run(ModelOptions(hidden_size=100), "gpt2"), ["--hidden-size 100", "--num-attention-heads 8"]),
        (lambda: sizes_of_run(ModelOptions(num_key_value_heads=3), "llama3"), ["--num-attention-heads 8", "heads 3"]),
        (lambda: sizes_of_run(ModelOptions(preset="gpt2-124m"), "llama3"), ["--preset gpt2-124m", "llama3-8b"]),
        (lambda: sizes_of_run(ModelOptions(dropout=1.0), "gpt2"), ["--dropout", "1.0"]),
        (lambda: sizes_of_run(ModelOptions(num_layers=0), "gpt2"), ["--num-layers", "0"]),
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
    model = sizes_of_run(ModelOptions(**override), "gpt2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{flag} is not divisible by --tensor-parallel 2"):
        model.check_divisible_by(2)


def test_the_total_batch_is_reached_by_accumulation_or_refused() -> None:
    data = DataOptions(batch_size=4, sequence_length=32, total_batch_size=4 * 32 * 6)
    assert data.num_micro_batches(data_parallel_size=2) == 3
    with pytest.raises(UserError, match=r"--total-batch-size 768 is not a multiple of .* 4 × 32 × 4 = 512"):
        data.num_micro_batches(data_parallel_size=4)
    assert DataOptions().num_micro_batches(data_parallel_size=8) == 1


def test_overrides_change_the_preset_and_nothing_else() -> None:
    model = sizes_of_run(ModelOptions(preset="gpt2-124m", num_layers=2, dropout=0.1), "gpt2")
    assert model == dataclasses.replace(preset("gpt2", "gpt2-124m"), num_layers=2, dropout=0.1)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Radford et al. 2019, table 2, as corrected with the released checkpoints.
        ("gpt2-124m", 124.4e6),
        ("gpt2-355m", 354.8e6),
        ("gpt2-774m", 774.0e6),
        ("gpt2-1.5b", 1557.6e6),
        # The parameter counts on the released checkpoints' cards.
        ("llama3-1b", 1.236e9),
        ("llama3-3b", 3.213e9),
        ("llama3-8b", 8.030e9),
        ("llama3-70b", 70.554e9),
        ("qwen3-0.6b", 0.596e9),
        ("qwen3-1.7b", 1.721e9),
        ("qwen3-4b", 4.022e9),
        ("qwen3-8b", 8.191e9),
        ("qwen3-14b", 14.768e9),
        ("qwen3-32b", 32.762e9),
        # Jiang et al. 2024 say 47 billion; the sum of the released tensors is this.
        ("mixtral-8x7b", 46.703e9),
    ],
)
def test_presets_have_the_published_sizes(name: str, parameters: float) -> None:
    family = name.split("-")[0]
    model = preset(family, name)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    queries, keys = model.num_attention_heads * model.head_size, model.key_value_heads * model.head_size
    experts = max(model.num_experts, 1)
    matrices = (
        hidden * (queries + 2 * keys) + queries * hidden + (2 if family == "gpt2" else 3) * hidden * ffn * experts
    )
    matrices += hidden * model.num_experts
    vectors = 2 * hidden
    tables = model.vocab_size * hidden * (1 if model.tie_embeddings else 2)
    if family == "gpt2":
        vectors += 2 * hidden + 3 * hidden + hidden + ffn + hidden
        tables += model.max_sequence_length * hidden
    if family == "qwen3":
        vectors += 2 * model.head_size
    total = tables + model.num_layers * (matrices + vectors) + hidden
    assert total == pytest.approx(parameters, rel=1e-3)


def test_every_option_says_what_it_is_for() -> None:
    for group in (ModelParallelConfig, ModelOptions, DataOptions, OptimizerOptions, RunOptions):
        for field in dataclasses.fields(group):
            assert field.metadata["help"].endswith("."), f"{group.__name__}.{field.name}"


def test_configs_are_frozen_and_keyword_only() -> None:
    for config in (ModelParallelConfig(), TrainConfig(), preset("gpt2", "gpt2-debug")):
        assert isinstance(config, ModelParallelConfig | TrainConfig | TransformerConfig)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.seed = 1  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        ModelParallelConfig(2)  # type: ignore[call-arg]
