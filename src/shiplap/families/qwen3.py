"""Qwen3 (Yang et al. 2025): LLaMA's block with a norm over each head's queries and keys."""

from dataclasses import replace
from functools import partial
from typing import Any

from shiplap.config.json_fields import JsonFields
from shiplap.config.model import TransformerConfig
from shiplap.families.family import Family, Names, debug_sizes, whole
from shiplap.families.llama3 import LLAMA3, SIZES, Absent, block_names, read_block_sizes, written_block_sizes

_ABSENT = Absent(key_value_heads=32, head_dim=128)


def _published(*, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> TransformerConfig:
    """Yang et al. 2025, table 1, and the released configurations."""
    return TransformerConfig(
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        ffn_hidden_size=ffn,
        max_sequence_length=40960,
        norm_epsilon=1e-6,
        rope_theta=1000000.0,
        tie_embeddings=tied,
    )


def _read_sizes(fields: JsonFields) -> dict[str, Any]:
    fields.ignore("sliding_window", "max_window_layers")  # nothing without use_sliding_window
    return read_block_sizes(fields, _ABSENT)


def _names(config: TransformerConfig) -> Names:
    yield from block_names(config)
    for i in range(config.num_layers):
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            name = f"model.layers.{i}.self_attn.{theirs}.weight"
            yield f"blocks.{i}.attention.{ours}.weight", whole(name, config.head_size)


QWEN3 = Family(
    name="qwen3",
    architecture=replace(LLAMA3.architecture, has_query_key_norm=True),
    presets={
        "qwen3-debug": partial(
            debug_sizes, num_key_value_heads=4, head_dim=32, rope_theta=1000000.0, norm_epsilon=1e-6
        ),
        "qwen3-0.6b": partial(_published, layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
        "qwen3-1.7b": partial(_published, layers=28, hidden=2048, heads=16, ffn=6144, tied=True),
        "qwen3-4b": partial(_published, layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
        "qwen3-8b": partial(_published, layers=36, hidden=4096, heads=32, ffn=12288),
        "qwen3-14b": partial(_published, layers=40, hidden=5120, heads=40, ffn=17408),
        "qwen3-32b": partial(_published, layers=64, hidden=5120, heads=64, ffn=25600),
    },
    model_type="qwen3",
    classes=("Qwen3ForCausalLM",),
    size_names=SIZES,
    read_sizes=_read_sizes,
    written_sizes=written_block_sizes,
    huggingface_names=_names,
)
