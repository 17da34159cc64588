"""`config.json` of Hugging Face directories: what is read, what is refused, and what is written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from shiplap.config import TransformerConfig, UserError
from shiplap.config.model import RopeScaling
from shiplap.families import FAMILIES, preset
from shiplap.families.config_json import read_config, to_huggingface

# As published.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
PUBLISHED = {"gpt2": GPT2, "llama3": LLAMA3, "qwen3": QWEN3, "mixtral": MIXTRAL}
Read = Callable[..., TransformerConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a published configuration with changes; a field that is changed to `...` is left out."""

    def read(family: str, **changes: Any) -> TransformerConfig:
        fields = {name: value for name, value in (PUBLISHED[family] | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        found, config = read_config(str(tmp_path), None)
        assert found == family
        return config

    return read


def _explicit(config: TransformerConfig) -> TransformerConfig:
    return replace(config, head_dim=config.head_size, num_key_value_heads=config.key_value_heads)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt2", "gpt2-124m"), ("llama3", "llama3-1b"), ("qwen3", "qwen3-0.6b"), ("mixtral", "mixtral-8x7b")],
)
def test_published_configurations_are_the_presets(read: Read, family: str, name: str) -> None:
    config, expected = read(family), preset(family, name)
    if family == "gpt2":
        expected = replace(expected, dropout=0.1)
    assert _explicit(config) == _explicit(expected)


@pytest.mark.parametrize("family", list(PUBLISHED))
def test_absent_fields_mean_what_they_mean_to_transformers(read: Read, tmp_path: Path, family: str) -> None:
    """Every field but the sizes is left out, and then transformers writes what it takes them for."""
    sizes = (
        "model_type vocab_size n_embd n_layer n_head n_positions hidden_size num_hidden_layers num_attention_heads "
        "intermediate_size max_position_embeddings num_local_experts"
    )
    absent = {name: ... for name in PUBLISHED[family] if name not in sizes}
    # Qwen3's default is 32 key-value heads.
    config = read(family, **(absent | ({"num_attention_heads": 32} if family == "qwen3" else {})))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "explicit")
    assert _explicit(config) == _explicit(read_config(str(tmp_path / "explicit"), family)[1])


def test_a_null_is_not_the_default_where_transformers_sees_a_difference(read: Read) -> None:
    assert read("qwen3", num_key_value_heads=None, num_attention_heads=8, head_dim=None).key_value_heads == 8
    assert read("qwen3", head_dim=None).head_size == 64
    assert read("qwen3", head_dim=...).head_size == 128
    assert read("mixtral", num_key_value_heads=None).key_value_heads == 32
    assert read("mixtral", num_key_value_heads=...).key_value_heads == 8


def test_rotary_positions_in_both_forms(read: Read) -> None:
    scaling = LLAMA3["rope_scaling"]
    assert isinstance(scaling, dict)
    old = read("llama3")
    assert old.rope_scaling == RopeScaling(factor=32.0)
    new = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": scaling | {"rope_theta": 500000.0}}
    assert read("llama3", **new) == old
    assert read("llama3", rope_scaling={"type": "default"}).rope_scaling is None
    older = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    assert read("llama3", rope_scaling=older) == old
    without = {name: value for name, value in scaling.items() if name != "original_max_position_embeddings"}
    found = read("llama3", rope_scaling=without).rope_scaling
    assert found is not None
    assert found.original_max_sequence_length == 131072


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt2", {"activation_function": "relu"}, ['activation_function "relu"', '"gelu_new" or "gelu_pytorch_tanh"']),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights false", "must be true"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx true"]),
        ("gpt2", {"reorder_and_upcast_attn": True}, ["reorder_and_upcast_attn true"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention true"]),
        ("gpt2", {"resid_pdrop": 0.2}, ["embd_pdrop 0.1, resid_pdrop 0.2, attn_pdrop 0.1", "Make them equal"]),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, ["architectures", "GPT2LMHeadModel"]),
        ("gpt2", {"n_embd": 100}, ["n_embd 100 is not divisible by n_head 12"]),
        ("gpt2", dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 1.0), ["embd_pdrop must be in [0, 1)"]),
        ("llama3", {"attention_bias": True}, ["attention_bias true", "must be false"]),
        ("llama3", {"mlp_bias": True}, ["mlp_bias true"]),
        ("llama3", {"hidden_act": "gelu"}, ['hidden_act "gelu"', '"silu"']),
        ("llama3", {"attention_dropout": 0.1}, ["attention_dropout 0.1"]),
        ("llama3", {"sliding_window": 4096}, ["sliding_window 4096", "must be null"]),
        ("llama3", {"quantization_config": {"bits": 4}}, ["quantization_config", "quantized"]),
        ("llama3", {"logits_scaling": 8}, ["logits_scaling", "it is 8", "remove it from the file"]),
        ("llama3", {"auto_map": {"AutoModel": "custom.Model"}}, ["auto_map", "custom.Model"]),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "rope_type linear"]),
        ("llama3", {"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling: factor is missing"]),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            ["low_freq_factor below high_freq_factor", "8, 4 and 1"],
        ),
        ("llama3", {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters and rope_scaling"]),
        (
            "llama3",
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
            ["rope_theta must be one number above 0, got 10000 and 500000"],
        ),
        ("llama3", {"rope_theta": 0}, ["rope_theta must be one number above 0"]),
        ("llama3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        (
            "llama3",
            {"rope_scaling": None, "rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            ["rope_parameters: full_attention is not a field"],
        ),
        ("llama3", {"head_dim": 5}, ["head_dim is 5", "even"]),
        ("llama3", {"head_dim": 0}, ["head_dim must be at least 1, got 0"]),
        ("llama3", {"num_key_value_heads": 5}, ["num_attention_heads 32 is not divisible by num_key_value_heads 5"]),
        ("llama3", {"hidden_size": ...}, ["hidden_size is missing"]),
        ("llama3", {"hidden_size": "2048"}, ["hidden_size must be a whole number", '"2048"']),
        ("llama3", {"hidden_size": 2048.0}, ["hidden_size must be a whole number", "2048.0"]),
        ("llama3", {"num_hidden_layers": True}, ["num_hidden_layers must be a whole number", "true"]),
        ("llama3", {"num_hidden_layers": 0}, ["num_hidden_layers must be at least 1, got 0"]),
        ("llama3", {"rms_norm_eps": "small"}, ["rms_norm_eps must be a number"]),
        ("llama3", {"rms_norm_eps": float("nan")}, ["rms_norm_eps must be a number"]),
        ("llama3", {"rms_norm_eps": -1e-5}, ["rms_norm_eps must be at least 0"]),
        ("llama3", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings must be true or false"]),
        ("llama3", {"rope_scaling": "llama3"}, ["rope_scaling must be an object"]),
        ("llama3", {"layer_types": "full"}, ["layer_types must be a list"]),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window true"]),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ("mixtral", {"sliding_window": 4096}, ["sliding_window 4096"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise 0.1"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["9 of 8 experts (num_local_experts)"]),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    read: Read, tmp_path: Path, *, family: str, changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        read(family, **changes)
    assert f"{tmp_path}/config.json" in str(error.value)
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "harmless",
    [{"output_router_logits": True}, {"id2label": {"0": "no"}}, {"pruned_heads": {}}, {"is_decoder": False}],
)
def test_what_changes_nothing_is_accepted(read: Read, harmless: dict[str, Any]) -> None:
    assert read("mixtral", **harmless) == read("mixtral")


@pytest.mark.parametrize(
    ("content", "family", "named"),
    [
        (json.dumps(QWEN3), "llama3", ["model_type qwen3 is shiplap's qwen3", "llama3 was asked for"]),
        (json.dumps(LLAMA3), "gpt2", ["model_type llama is shiplap's llama3", "gpt2 was asked for"]),
        ('{"model_type": "mistral"}', "llama3", ["model_type mistral", "llama3 was asked for", "gpt2, llama, qwen3"]),
        ("{}", None, ["model_type is missing"]),
        ('{"model_type": 3}', None, ["model_type must be a string"]),
        ("{", None, ["not valid JSON"]),
        ("[" * 100_000, None, ["not valid JSON"]),
        ("\udcff", None, ["not valid JSON"]),
        ("[]", None, ["holds a JSON list"]),
    ],
)
def test_another_family_and_broken_files_are_refused(
    tmp_path: Path, *, content: str, family: str | None, named: list[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as error:
        read_config(str(tmp_path), family)
    for part in (f"{tmp_path}/config.json", *named):
        assert part in str(error.value)


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"meta-llama/Llama-3\.2-1B: there is no such folder.*hf download"):
        read_config("meta-llama/Llama-3.2-1B", None)
    with pytest.raises(UserError, match=r"config\.json: cannot read it: No such file"):
        read_config(str(tmp_path), None)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family].presets]
)
def test_what_is_written_reads_the_same_here_and_in_transformers(tmp_path: Path, family: str, name: str) -> None:
    config = replace(preset(family, name), dropout=0.25 if family == "gpt2" else 0.0)
    (tmp_path / "config.json").write_text(json.dumps(to_huggingface(family, config, dtype="bfloat16")))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert _explicit(read_config(str(folder), family)[1]) == _explicit(config)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt2", {"num_key_value_heads": 4}, ["GPT-2", "--num-key-value-heads 4", "--num-attention-heads 8"]),
        ("llama3", {"num_attention_heads": 12, "head_dim": 16}, ["--hidden-size 128", "--num-attention-heads 12"]),
        ("qwen3", {"num_experts": 4}, ["qwen3 has no experts", "--num-experts is 4"]),
    ],
)
def test_what_transformers_cannot_express_is_refused(family: str, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UserError) as error:
        to_huggingface(family, replace(preset(family, f"{family}-debug"), **changes), dtype="float32")
    for part in named:
        assert part in str(error.value)
