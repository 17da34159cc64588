"""Mixtral (Jiang et al. 2024): LLaMA's block with experts in the place of the feed-forward layer."""

from dataclasses import replace
from functools import partial
from typing import Any

from shiplap.config.json_fields import JsonFields
from shiplap.config.model import TransformerConfig
from shiplap.families.family import Family, Names, Stored, debug_sizes, whole
from shiplap.families.llama3 import LLAMA3, SIZES, Absent, block_names, read_block_sizes, written_block_sizes

_ABSENT = Absent(key_value_heads=8, norm_epsilon=1e-5, rope_theta=1e6)


def _published() -> TransformerConfig:
    """Mixtral 8x7B: Jiang et al. 2024, table 1, and the released configuration."""
    return TransformerConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        ffn_hidden_size=14336,
        max_sequence_length=32768,
        rope_theta=1000000.0,
        tie_embeddings=False,
        num_experts=8,
        router_aux_loss_coefficient=0.02,
    )


def _read_sizes(fields: JsonFields) -> dict[str, Any]:
    fields.must_be("sliding_window", None)
    sizes = read_block_sizes(fields, _ABSENT) | {
        "num_experts": fields.integer("num_local_experts"),
        "num_experts_per_token": fields.integer("num_experts_per_tok", 2),
        "router_aux_loss_coefficient": fields.number("router_aux_loss_coef", 0.001),
    }
    fields.must_be("router_jitter_noise", 0.0)
    fields.ignore("output_router_logits")  # what is returned beside the logits
    return sizes


def _written_sizes(config: TransformerConfig) -> dict[str, Any]:
    return written_block_sizes(config) | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": config.router_aux_loss_coefficient,
        "output_router_logits": config.router_aux_loss_coefficient > 0,  # else transformers leaves out that loss
    }


def _experts_names(config: TransformerConfig, here: str, there: str) -> Names:
    """Of each expert w1 is the gate, w3 the way up and w2 the way down."""
    experts = [f"{there}.block_sparse_moe.experts.{e}" for e in range(config.num_experts)]
    yield f"{here}.mlp.router.weight", whole(f"{there}.block_sparse_moe.gate.weight", config.num_experts)
    parts = tuple((f"{expert}.{w}.weight", config.ffn_hidden_size) for expert in experts for w in ("w1", "w3"))
    yield f"{here}.mlp.fc1.weight", Stored(parts=parts)
    parts = tuple((f"{expert}.w2.weight", config.hidden_size) for expert in experts)
    yield f"{here}.mlp.fc2.weight", Stored(parts=parts)


MIXTRAL = Family(
    name="mixtral",
    architecture=replace(LLAMA3.architecture, has_experts=True),
    presets={
        "mixtral-debug": partial(
            debug_sizes,
            num_key_value_heads=4,
            ffn_hidden_size=256,
            rope_theta=1000000.0,
            tie_embeddings=False,
            num_experts=4,
            router_aux_loss_coefficient=0.02,
        ),
        "mixtral-8x7b": _published,
    },
    model_type="mixtral",
    classes=("MixtralForCausalLM",),
    size_names=SIZES | {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"},
    read_sizes=_read_sizes,
    written_sizes=_written_sizes,
    huggingface_names=partial(block_names, feed_forward=_experts_names),
)
