"""GPT-2 (Radford et al. 2019): learned positions, layer norm, biases, GELU."""

from typing import Any

from shiplap.config.json_fields import JsonFields
from shiplap.config.model import TransformerConfig
from shiplap.config.option import UserError
from shiplap.families.family import Architecture, Family, Names, debug_sizes, whole

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_sequence_length": "n_positions",
    "dropout": "embd_pdrop",
}
_DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
_LINEAR = {
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def _published(num_layers: int, hidden_size: int, num_attention_heads: int) -> TransformerConfig:
    """Radford et al. 2019, table 2; head counts from the released checkpoints."""
    return TransformerConfig(
        vocab_size=50257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        ffn_hidden_size=4 * hidden_size,
        max_sequence_length=1024,
    )


def _read_sizes(fields: JsonFields) -> dict[str, Any]:
    sizes: dict[str, Any] = {ours: fields.integer(theirs) for ours, theirs in _SIZES.items() if ours != "dropout"}
    sizes["ffn_hidden_size"] = fields.integer("n_inner", 4 * sizes["hidden_size"])
    # One function under two names.
    fields.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must_be("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.must_be(name, False)
    dropouts = {name: fields.number(name, 0.1) for name in _DROPOUTS}
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
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "initializer_range": fields.number("initializer_range", 0.02),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }


def _written_sizes(config: TransformerConfig) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    if config.key_value_heads != heads or config.head_size * heads != hidden:
        raise UserError(
            f"transformers' GPT-2 cannot have --num-key-value-heads {config.key_value_heads} with "
            f"--num-attention-heads {heads}: they must be the same."
        )
    sizes = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    others = {
        "n_inner": config.ffn_hidden_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
    }
    return sizes | others | dict.fromkeys(_DROPOUTS, config.dropout)


def _rows(config: TransformerConfig) -> dict[str, int]:
    hidden = config.hidden_size
    return {"attention.qkv": 3 * hidden, "attention.proj": hidden, "mlp.fc1": config.ffn_hidden_size, "mlp.fc2": hidden}


def _names(config: TransformerConfig, *, transposed: bool) -> Names:
    """Those of Hugging Face and of llm.c, which differ in how linear weights stand."""
    hidden = config.hidden_size
    yield "embedding.weight", whole("transformer.wte.weight", config.vocab_size)
    yield "positions.weight", whole("transformer.wpe.weight", config.max_sequence_length)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        for ours, rows in _rows(config).items():
            yield f"{here}.{ours}.weight", whole(f"{there}.{_LINEAR[ours]}.weight", rows, transposed=transposed)
            yield f"{here}.{ours}.bias", whole(f"{there}.{_LINEAR[ours]}.bias", rows)
        for ours, theirs in _NORMS.items():
            for kind in ("weight", "bias"):
                yield f"{here}.{ours}.{kind}", whole(f"{there}.{theirs}.{kind}", hidden)
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", whole(f"transformer.ln_f.{kind}", hidden)


def _huggingface_names(config: TransformerConfig) -> Names:
    yield from _names(config, transposed=True)
    if not config.tie_embeddings:
        yield "head.projection.weight", whole("lm_head.weight", config.vocab_size)


def _llmc_names(config: TransformerConfig) -> Names:
    return _names(config, transposed=False)


GPT2 = Family(
    name="gpt2",
    architecture=Architecture(norm="layer", positions="learned", has_biases=True, feed_forward="gelu"),
    presets={
        "gpt2-debug": debug_sizes,
        "gpt2-124m": lambda: _published(12, 768, 12),
        "gpt2-355m": lambda: _published(24, 1024, 16),
        "gpt2-774m": lambda: _published(36, 1280, 20),
        "gpt2-1.5b": lambda: _published(48, 1600, 25),
    },
    model_type="gpt2",
    classes=("GPT2LMHeadModel", "GPT2Model"),
    size_names=_SIZES,
    read_sizes=_read_sizes,
    written_sizes=_written_sizes,
    huggingface_names=_huggingface_names,
    llmc_names=_llmc_names,
)
