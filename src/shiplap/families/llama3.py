"""LLaMA 3 (Grattafiori et al. 2024): RMS norm, rotary positions, grouped queries, SwiGLU; no biases.

Qwen3 and Mixtral have the same block with one part changed, and take what they share from here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shiplap.config.json_fields import JsonFields
from shiplap.config.model import RopeScaling, TransformerConfig
from shiplap.config.option import UserError
from shiplap.families.family import Architecture, Family, Names, Stored, debug_sizes, whole

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
_SCALING = RopeScaling(factor=8.0)
_SCALING_OF_3_2 = RopeScaling(factor=32.0)


def _published(
    *, layers: int, hidden: int, heads: int, ffn: int, scaling: RopeScaling = _SCALING, tied: bool = False
) -> TransformerConfig:
    """LLaMA 3.1 (8B, 70B) and 3.2 (1B, 3B): Grattafiori et al. 2024, table 3, and the released configurations."""
    return TransformerConfig(
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        ffn_hidden_size=ffn,
        max_sequence_length=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_embeddings=tied,
    )


@dataclass(frozen=True, kw_only=True)
class Absent:
    """What a field means where it is absent. The values are those of transformers 5.24."""

    key_value_heads: int | None = None
    head_dim: int | None = None
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0


def read_block_sizes(fields: JsonFields, absent: Absent) -> dict[str, Any]:
    """The sizes of a model with this block."""
    sizes: dict[str, Any] = {ours: fields.integer(theirs) for ours, theirs in SIZES.items() if ours not in _OPTIONAL}
    # Null is not the same as absent here.
    heads = sizes["num_attention_heads"]
    default_heads = heads if fields.is_null("num_key_value_heads") else absent.key_value_heads or heads
    sizes["num_key_value_heads"] = fields.integer("num_key_value_heads", default_heads)
    if fields.has("head_dim") or (absent.head_dim and not fields.is_null("head_dim")):
        sizes["head_dim"] = fields.integer("head_dim", absent.head_dim)
    if (head_size := sizes.get("head_dim", sizes["hidden_size"] // heads)) % 2:
        raise UserError(f"{fields.path}: rotary positions need heads of an even size, but head_dim is {head_size}.")
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    fields.must_be("mlp_bias", False)
    fields.must_be("attention_dropout", 0.0)
    fields.must_be("use_sliding_window", False)
    fields.every("layer_types", "full_attention")
    return sizes | {
        "norm_epsilon": fields.number("rms_norm_eps", absent.norm_epsilon),
        "initializer_range": fields.number("initializer_range", 0.02),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        **_read_rope(fields, default_theta=absent.rope_theta),
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


def written_block_sizes(config: TransformerConfig) -> dict[str, Any]:
    """The fields of `config.json` that every model with this block has."""
    fields = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()} | {
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
    return fields


def _swiglu_names(config: TransformerConfig, here: str, there: str) -> Names:
    parts = tuple((f"{there}.mlp.{name}.weight", config.ffn_hidden_size) for name in ("gate_proj", "up_proj"))
    yield f"{here}.mlp.fc1.weight", Stored(parts=parts)
    yield f"{here}.mlp.fc2.weight", whole(f"{there}.mlp.down_proj.weight", config.hidden_size)


def block_names(
    config: TransformerConfig, feed_forward: Callable[[TransformerConfig, str, str], Names] = _swiglu_names
) -> Names:
    """The parameters as Hugging Face's tensors, with those of the feed-forward layer as asked.

    Args:
        config: the model's sizes.
        feed_forward: given the sizes, and what a block is called here and there.
    """
    hidden = config.hidden_size
    queries, keys = (n * config.head_size for n in (config.num_attention_heads, config.key_value_heads))
    yield "embedding.weight", whole("model.embed_tokens.weight", config.vocab_size)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"model.layers.{i}"
        qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        parts = tuple((f"{there}.self_attn.{name}.weight", rows) for name, rows in qkv)
        yield f"{here}.attention.qkv.weight", Stored(parts=parts)
        yield f"{here}.attention.proj.weight", whole(f"{there}.self_attn.o_proj.weight", hidden)
        yield f"{here}.attention_norm.weight", whole(f"{there}.input_layernorm.weight", hidden)
        yield f"{here}.mlp_norm.weight", whole(f"{there}.post_attention_layernorm.weight", hidden)
        yield from feed_forward(config, here, there)
    yield "final_norm.weight", whole("model.norm.weight", hidden)
    if not config.tie_embeddings:
        yield "head.projection.weight", whole("lm_head.weight", config.vocab_size)


def _read_sizes(fields: JsonFields) -> dict[str, Any]:
    fields.must_be("sliding_window", None)
    return read_block_sizes(fields, Absent())


def _written_sizes(config: TransformerConfig) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    if hidden % heads:
        raise UserError(
            f"transformers' Llama cannot have --hidden-size {hidden} with --num-attention-heads {heads}: it must be a "
            "multiple, whatever the size of a head."
        )
    return written_block_sizes(config)


def _llmc_names(config: TransformerConfig) -> Names:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    qkv = (config.num_attention_heads + 2 * config.key_value_heads) * config.head_size
    yield "embedding.weight", whole("transformer.wte.weight", config.vocab_size)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        yield f"{here}.attention_norm.weight", whole(f"{there}.ln_1.weight", hidden)
        yield f"{here}.attention.qkv.weight", whole(f"{there}.attn.c_attn.weight", qkv)
        yield f"{here}.attention.proj.weight", whole(f"{there}.attn.c_proj.weight", hidden)
        yield f"{here}.mlp_norm.weight", whole(f"{there}.ln_2.weight", hidden)
        gate_and_up = ((f"{there}.mlp.c_fc2.weight", ffn), (f"{there}.mlp.c_fc.weight", ffn))
        yield f"{here}.mlp.fc1.weight", Stored(parts=gate_and_up)
        yield f"{here}.mlp.fc2.weight", whole(f"{there}.mlp.c_proj.weight", hidden)
    yield "final_norm.weight", whole("transformer.ln_f.weight", hidden)
    yield "head.projection.weight", whole("lm_head.weight", config.vocab_size)


LLAMA3 = Family(
    name="llama3",
    architecture=Architecture(norm="rms", positions="rotary", has_biases=False, feed_forward="swiglu"),
    presets={
        "llama3-debug": partial(
            debug_sizes, num_key_value_heads=4, rope_theta=500000.0, rope_scaling=_SCALING, tie_embeddings=False
        ),
        "llama3-1b": partial(
            _published, layers=16, hidden=2048, heads=32, ffn=8192, scaling=_SCALING_OF_3_2, tied=True
        ),
        "llama3-3b": partial(
            _published, layers=28, hidden=3072, heads=24, ffn=8192, scaling=_SCALING_OF_3_2, tied=True
        ),
        "llama3-8b": partial(_published, layers=32, hidden=4096, heads=32, ffn=14336),
        "llama3-70b": partial(_published, layers=80, hidden=8192, heads=64, ffn=28672),
    },
    model_type="llama",
    classes=("LlamaForCausalLM",),
    size_names=SIZES,
    read_sizes=_read_sizes,
    written_sizes=_written_sizes,
    huggingface_names=block_names,
    llmc_names=_llmc_names,
)
