"""Where a model's parameters stand in llm.c's model files."""

from collections.abc import Iterator

from shiplap.config.model import TransformerConfig
from shiplap.models.stored import Stored


def llmc_names(family: str, config: TransformerConfig) -> dict[str, Stored]:
    """Every parameter of a model, by its name here, as the tensors of `shiplap.config.llmc`."""
    return dict(_gpt2(config) if family == "gpt2" else _llama3(config))


def _whole(name: str, rows: int) -> Stored:
    return Stored(parts=((name, rows),))


def _gpt2(config: TransformerConfig) -> Iterator[tuple[str, Stored]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    yield "embedding.weight", _whole("transformer.wte.weight", config.vocab_size)
    yield "positions.weight", _whole("transformer.wpe.weight", config.max_sequence_length)
    for i in range(config.num_layers):
        for ours, theirs, rows in (
            ("attention_norm", "ln_1", hidden),
            ("attention.qkv", "attn.c_attn", 3 * hidden),
            ("attention.proj", "attn.c_proj", hidden),
            ("mlp_norm", "ln_2", hidden),
            ("mlp.fc1", "mlp.c_fc", ffn),
            ("mlp.fc2", "mlp.c_proj", hidden),
        ):
            for kind in ("weight", "bias"):
                yield f"blocks.{i}.{ours}.{kind}", _whole(f"transformer.h.{i}.{theirs}.{kind}", rows)
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", _whole(f"transformer.ln_f.{kind}", hidden)


def _llama3(config: TransformerConfig) -> Iterator[tuple[str, Stored]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    qkv = (config.num_attention_heads + 2 * config.key_value_heads) * config.head_size
    yield "embedding.weight", _whole("transformer.wte.weight", config.vocab_size)
    for i in range(config.num_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        yield f"{here}.attention_norm.weight", _whole(f"{there}.ln_1.weight", hidden)
        yield f"{here}.attention.qkv.weight", _whole(f"{there}.attn.c_attn.weight", qkv)
        yield f"{here}.attention.proj.weight", _whole(f"{there}.attn.c_proj.weight", hidden)
        yield f"{here}.mlp_norm.weight", _whole(f"{there}.ln_2.weight", hidden)
        gate_and_up = ((f"{there}.mlp.c_fc2.weight", ffn), (f"{there}.mlp.c_fc.weight", ffn))
        yield f"{here}.mlp.fc1.weight", Stored(parts=gate_and_up)
        yield f"{here}.mlp.fc2.weight", _whole(f"{there}.mlp.c_proj.weight", hidden)
    yield "final_norm.weight", _whole("transformer.ln_f.weight", hidden)
    yield "head.projection.weight", _whole("lm_head.weight", config.vocab_size)
