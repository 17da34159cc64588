"""Where a model's parameters stand in published checkpoint files."""

from collections.abc import Iterator
from dataclasses import dataclass

from shiplap.config.model import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One parameter as tensors in files: put one below the other they are the whole parameter.

    Attributes:
        parts: name and number of rows of each; rows of the parameter, dim 0.
        transposed: each stands there as `[I, rows]` instead of `[rows, I]`.
    """

    parts: tuple[tuple[str, int], ...]
    transposed: bool = False


def huggingface_names(family: str, config: TransformerConfig) -> dict[str, Stored]:
    """Every parameter of a model, by its name here, as the tensors that `transformers` saves.

    The names and layouts are those of its GPT-2, Llama, Qwen3 and Mixtral models, whose fused weights, if any, stand
    apart in files. Tied output heads are not stored.
    """
    names = dict(_gpt2(config) if family == "gpt2" else _llama(config))
    if family == "qwen3":
        names |= _query_key_norms(config)
    return names


def _whole(name: str, rows: int, *, transposed: bool = False) -> Stored:
    return Stored(parts=((name, rows),), transposed=transposed)


def _gpt2(config: TransformerConfig) -> Iterator[tuple[str, Stored]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    yield "embedding.weight", _whole("transformer.wte.weight", config.vocab_size)
    yield "positions.weight", _whole("transformer.wpe.weight", config.max_sequence_length)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        for ours, theirs, rows in (
            ("attention.qkv", "attn.c_attn", 3 * hidden),
            ("attention.proj", "attn.c_proj", hidden),
            ("mlp.fc1", "mlp.c_fc", ffn),
            ("mlp.fc2", "mlp.c_proj", hidden),
        ):
            yield f"{here}.{ours}.weight", _whole(f"{there}.{theirs}.weight", rows, transposed=True)
            yield f"{here}.{ours}.bias", _whole(f"{there}.{theirs}.bias", rows)
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            for kind in ("weight", "bias"):
                yield f"{here}.{ours}.{kind}", _whole(f"{there}.{theirs}.{kind}", hidden)
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", _whole(f"transformer.ln_f.{kind}", hidden)
    if not config.tie_embeddings:
        yield "head.projection.weight", _whole("lm_head.weight", config.vocab_size)


def _llama(config: TransformerConfig) -> Iterator[tuple[str, Stored]]:
    hidden = config.hidden_size
    queries, keys = (n * config.head_size for n in (config.num_attention_heads, config.key_value_heads))
    yield "embedding.weight", _whole("model.embed_tokens.weight", config.vocab_size)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"model.layers.{i}"
        qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        parts = tuple((f"{there}.self_attn.{name}.weight", rows) for name, rows in qkv)
        yield f"{here}.attention.qkv.weight", Stored(parts=parts)
        yield f"{here}.attention.proj.weight", _whole(f"{there}.self_attn.o_proj.weight", hidden)
        yield f"{here}.attention_norm.weight", _whole(f"{there}.input_layernorm.weight", hidden)
        yield f"{here}.mlp_norm.weight", _whole(f"{there}.post_attention_layernorm.weight", hidden)
        yield from _experts(config, here, there) if config.num_experts else _swiglu(config, here, there)
    yield "final_norm.weight", _whole("model.norm.weight", hidden)
    if not config.tie_embeddings:
        yield "head.projection.weight", _whole("lm_head.weight", config.vocab_size)


def _swiglu(config: TransformerConfig, here: str, there: str) -> Iterator[tuple[str, Stored]]:
    parts = tuple((f"{there}.mlp.{name}.weight", config.ffn_hidden_size) for name in ("gate_proj", "up_proj"))
    yield f"{here}.mlp.fc1.weight", Stored(parts=parts)
    yield f"{here}.mlp.fc2.weight", _whole(f"{there}.mlp.down_proj.weight", config.hidden_size)


def _experts(config: TransformerConfig, here: str, there: str) -> Iterator[tuple[str, Stored]]:
    """Of each expert w1 is the gate, w3 the way up and w2 the way down."""
    experts = [f"{there}.block_sparse_moe.experts.{e}" for e in range(config.num_experts)]
    yield f"{here}.mlp.router.weight", _whole(f"{there}.block_sparse_moe.gate.weight", config.num_experts)
    parts = tuple((f"{expert}.{w}.weight", config.ffn_hidden_size) for expert in experts for w in ("w1", "w3"))
    yield f"{here}.mlp.fc1.weight", Stored(parts=parts)
    parts = tuple((f"{expert}.w2.weight", config.hidden_size) for expert in experts)
    yield f"{here}.mlp.fc2.weight", Stored(parts=parts)


def _query_key_norms(config: TransformerConfig) -> Iterator[tuple[str, Stored]]:
    for i in range(config.num_layers):
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            name = f"model.layers.{i}.self_attn.{theirs}.weight"
            yield f"blocks.{i}.attention.{ours}.weight", _whole(name, config.head_size)
