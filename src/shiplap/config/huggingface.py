"""`config.json` of a Hugging Face directory: read, with nothing overlooked that changes a model, and written."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiplap.config.json_fields import JsonFields, read_json_object
from shiplap.config.model import RopeScaling, TransformerConfig
from shiplap.config.option import UserError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class _ModelType:
    """What is particular to one of `transformers`' models: its names, and what a field means where it is absent.

    The values are those of transformers 5.24.
    """

    name: str
    architecture: str
    key_value_heads: int | None = None
    head_dim: int | None = None
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0


_MODEL_TYPES = {
    "gpt2": _ModelType(name="gpt2", architecture="GPT2LMHeadModel", norm_epsilon=1e-5),
    "llama3": _ModelType(name="llama", architecture="LlamaForCausalLM"),
    "qwen3": _ModelType(name="qwen3", architecture="Qwen3ForCausalLM", key_value_heads=32, head_dim=128),
    "mixtral": _ModelType(
        name="mixtral", architecture="MixtralForCausalLM", key_value_heads=8, norm_epsilon=1e-5, rope_theta=1e6
    ),
}
# Our sizes by their names in the file.
_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_sequence_length": "n_positions",
}
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
}
_OTHER_NAMES = {
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "dropout": "embd_pdrop",
}
_GPT2_DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
# They say where a model comes from, in which dtype it stands in the files, what is returned beside the logits, how
# text is generated, or what a classifier would be. None changes the logits.
_HARMLESS = (
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "dtype", "torch_dtype",
    "torchscript", "gradient_checkpointing", "use_cache", "chunk_size_feed_forward", "pretraining_tp",
    "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "max_length", "max_new_tokens",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "length_penalty", "repetition_penalty", "exponential_decay_length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "temperature", "top_k", "top_p", "typical_p",
    "remove_invalid_values", "prefix", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "finetuning_task",
)  # fmt: skip


def read_config(directory: str, family: str | None) -> tuple[str, TransformerConfig]:
    """The model that a Hugging Face directory describes.

    Args:
        directory: with a `config.json`, as any release of `transformers` writes it.
        family: what the model must be, such as `llama3`; None: any family that shiplap has.

    Returns:
        The family, and the sizes.

    Raises:
        UserError: the file is missing or broken, is of another family, lacks a field, or describes something that
            shiplap does not compute. A field that shiplap does not know is refused too.
    """
    if not Path(directory).is_dir():
        raise UserError(
            f"{directory}: there is no such folder. It must be a Hugging Face model on this machine: shiplap downloads "
            "nothing, but `hf download MODEL --local-dir FOLDER` does."
        )
    path = Path(directory) / CONFIG_FILE
    fields = JsonFields(str(path), read_json_object(path))
    family = _family(fields, family)
    fields.ignore(*_HARMLESS)
    fields.every("architectures", _MODEL_TYPES[family].architecture, *(("GPT2Model",) if family == "gpt2" else ()))
    if fields.has("quantization_config"):
        raise UserError(
            f"{path}: quantization_config: the weights are quantized. shiplap reads float32, bfloat16 and float16 "
            "ones; use the model they were made from."
        )
    sizes = _read_gpt2(fields) if family == "gpt2" else _read_llama(fields, family)
    fields.refuse_others()
    try:
        return family, TransformerConfig(**sizes)
    except UserError as error:
        names = (_GPT2_SIZES if family == "gpt2" else _LLAMA_SIZES) | _OTHER_NAMES
        by_flag = {"--" + ours.replace("_", "-"): theirs for ours, theirs in names.items()}
        message = re.sub(r"--[a-z-]+", lambda match: by_flag.get(match[0], match[0]), str(error))
        raise UserError(f"{path}: {message}") from None


def _family(fields: JsonFields, asked: str | None) -> str:
    found = fields.text("model_type")
    by_type = {model_type.name: family for family, model_type in _MODEL_TYPES.items()}
    wanted = "" if asked is None else f", and {asked} was asked for"
    if found not in by_type:
        raise UserError(f"{fields.path}: model_type {found} is not supported{wanted}; there is {', '.join(by_type)}.")
    if asked is not None and by_type[found] != asked:
        raise UserError(
            f"{fields.path}: model_type {found} is shiplap's {by_type[found]}{wanted}. Ask for {by_type[found]}."
        )
    return by_type[found]


def _read_gpt2(fields: JsonFields) -> dict[str, Any]:
    sizes: dict[str, Any] = {ours: fields.integer(theirs) for ours, theirs in _GPT2_SIZES.items()}
    sizes["ffn_hidden_size"] = fields.integer("n_inner", 4 * sizes["hidden_size"])
    # One function under two names.
    fields.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must_be("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.must_be(name, False)
    dropouts = {name: fields.number(name, 0.1) for name in _GPT2_DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise UserError(
            f"{fields.path}: {', '.join(f'{name} {value:g}' for name, value in dropouts.items())}: shiplap has one "
            "dropout for all three. Make them equal."
        )
    fields.ignore(
        "n_ctx",  # older releases: the same as n_positions
        *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    )
    return sizes | {
        "dropout": dropouts["embd_pdrop"],
        "norm_epsilon": fields.number("layer_norm_epsilon", _MODEL_TYPES["gpt2"].norm_epsilon),
        "initializer_range": fields.number("initializer_range", 0.02),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }


def _read_llama(fields: JsonFields, family: str) -> dict[str, Any]:
    """Llama, Qwen3 and Mixtral."""
    model_type = _MODEL_TYPES[family]
    sizes: dict[str, Any] = {ours: fields.integer(theirs) for ours, theirs in _LLAMA_SIZES.items()}
    # Null is not the same as absent here.
    heads = sizes["num_attention_heads"]
    default_heads = heads if fields.is_null("num_key_value_heads") else model_type.key_value_heads or heads
    sizes["num_key_value_heads"] = fields.integer("num_key_value_heads", default_heads)
    if fields.has("head_dim") or (model_type.head_dim and not fields.is_null("head_dim")):
        sizes["head_dim"] = fields.integer("head_dim", model_type.head_dim)
    if (head_size := sizes.get("head_dim", sizes["hidden_size"] // heads)) % 2:
        raise UserError(f"{fields.path}: rotary positions need heads of an even size, but head_dim is {head_size}.")
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    fields.must_be("mlp_bias", False)
    fields.must_be("attention_dropout", 0.0)
    fields.must_be("use_sliding_window", False)
    fields.every("layer_types", "full_attention")
    if family == "qwen3":
        fields.ignore("sliding_window", "max_window_layers")  # nothing without use_sliding_window
    else:
        fields.must_be("sliding_window", None)
    if family == "mixtral":
        sizes["num_experts"] = fields.integer("num_local_experts")
        sizes["num_experts_per_token"] = fields.integer("num_experts_per_tok", 2)
        sizes["router_aux_loss_coefficient"] = fields.number("router_aux_loss_coef", 0.001)
        fields.must_be("router_jitter_noise", 0.0)
        fields.ignore("output_router_logits")  # what is returned beside the logits
    return sizes | {
        "norm_epsilon": fields.number("rms_norm_eps", model_type.norm_epsilon),
        "initializer_range": fields.number("initializer_range", 0.02),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        **_read_rope(fields, default_theta=model_type.rope_theta),
    }


def _read_rope(fields: JsonFields, *, default_theta: float) -> dict[str, Any]:
    """Base and stretching: in one object since transformers 5, before that in two fields."""
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise UserError(f"{fields.path}: rope_parameters and rope_scaling say the same in two ways; remove one.")
    old, new = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    rope = new if fields.has("rope_parameters") else old
    outer = fields.number("rope_theta", default_theta)
    theta = rope.number("rope_theta", outer)
    if theta == 0.0 or (fields.has("rope_theta") and theta != outer):
        raise UserError(f"{fields.path}: rope_theta must be one number above 0, got {theta:g} and {outer:g}.")
    # Releases before 4.43 say `type`.
    kind = rope.text("rope_type", rope.text("type", "default"))
    for owner in (fields, rope):
        owner.must_be("partial_rotary_factor", 1.0)
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_sequence_length=rope.integer(
                "original_max_position_embeddings", fields.integer("max_position_embeddings")
            ),
        )
        if scaling.factor < 1.0 or scaling.low_freq_factor >= scaling.high_freq_factor:
            raise UserError(
                f"{rope.path}: factor must be at least 1, and low_freq_factor below high_freq_factor; got "
                f"{scaling.factor:g}, {scaling.low_freq_factor:g} and {scaling.high_freq_factor:g}."
            )
    elif kind != "default":
        raise UserError(f"{rope.path}: rope_type {kind} is not supported; there is default, llama3.")
    rope.refuse_others()
    return {"rope_theta": theta, "rope_scaling": scaling}


def to_huggingface(family: str, config: TransformerConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` from which `transformers` makes the same model.

    It uses the names that every release reads: `torch_dtype`, `rope_theta`, `rope_scaling`. Dropout of families
    other than GPT-2 is left out, since their models in `transformers` have none in these places.

    Args:
        family: such as `llama3`.
        config: the model's sizes.
        dtype: of the weights in the files, such as `float32`.

    Raises:
        UserError: `transformers` has no such model.
    """
    model_type = _MODEL_TYPES[family]
    _check_expressible(family, config)
    fields: dict[str, Any] = {
        "architectures": [model_type.architecture],
        "model_type": model_type.name,
        "torch_dtype": dtype,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        # Absent, they would be those of the tokenizer that the family's first model came with.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if family == "gpt2":
        fields |= {theirs: getattr(config, ours) for ours, theirs in _GPT2_SIZES.items()}
        fields |= {"n_inner": config.ffn_hidden_size, "activation_function": "gelu_new"}
        fields |= dict.fromkeys(_GPT2_DROPOUTS, config.dropout)
        return fields | {"layer_norm_epsilon": config.norm_epsilon}
    fields |= {theirs: getattr(config, ours) for ours, theirs in _LLAMA_SIZES.items()}
    fields |= {
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
    }
    if (scaling := config.rope_scaling) is not None:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_sequence_length,
        }
    if family == "mixtral":
        fields |= {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "router_aux_loss_coef": config.router_aux_loss_coefficient,
            "output_router_logits": config.router_aux_loss_coefficient > 0,  # else transformers leaves out that loss
        }
    return fields


def _check_expressible(family: str, config: TransformerConfig) -> None:
    heads, hidden = config.num_attention_heads, config.hidden_size
    if family == "gpt2" and (config.key_value_heads != heads or config.head_size * heads != hidden):
        raise UserError(
            f"transformers' GPT-2 cannot have --num-key-value-heads {config.key_value_heads} with "
            f"--num-attention-heads {heads}: they must be the same."
        )
    if family == "llama3" and hidden % heads:
        raise UserError(
            f"transformers' Llama cannot have --hidden-size {hidden} with --num-attention-heads {heads}: it must be a "
            "multiple, whatever the size of a head."
        )
    if family != "mixtral" and config.num_experts:
        raise UserError(f"{family} has no experts, but --num-experts is {config.num_experts}.")
