"""A writer of llm.c's model files, made from what is known of the format and from nothing in shiplap.

It takes the tensors by the names that `transformers` gives them.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VERSIONS = {torch.float32: 3, torch.bfloat16: 5}
LAYERS, HEADS, KEY_VALUE_HEADS, HIDDEN, FFN, VOCABULARY, LENGTH = 2, 8, 4, 64, 96, 37, 16
MULTIPLE = 32
PADDED = 128


def header(*numbers: int) -> bytes:
    ints = np.zeros(256, dtype="<i4")
    ints[: len(numbers)] = numbers
    return ints.tobytes()


def gpt2_header(version: int = 3) -> bytes:
    return header(20240326, version, LENGTH, VOCABULARY, LAYERS, HEADS, HIDDEN, PADDED)


def llama3_header(version: int = 3, *, scaled: int = 1) -> bytes:
    """Of the branch master; 1.3 and 1e-5 became 1 and 0."""
    sizes = (LENGTH, VOCABULARY, LAYERS, HEADS, KEY_VALUE_HEADS, HIDDEN)
    return header(20240803, version, *sizes, 1, MULTIPLE, 0, 500000, scaled, 4, 3, 1)


def llama3_branch_header(version: int = 3, *, minor: int = 1) -> bytes:
    """Of the branch llama3."""
    sizes = (LENGTH, VOCABULARY, LAYERS, HEADS, KEY_VALUE_HEADS, HIDDEN)
    floats = np.full(256, np.nan, dtype="<f4")  # the C code leaves what it does not need as memory happens to be
    floats[:3] = 1.3, 1e-5, 500000.0
    return header(20240803, version, *sizes, MULTIPLE, 1, 3, minor) + floats.tobytes()


def write_gpt2(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    table = tensors["transformer.wte.weight"]
    padding = torch.full((PADDED - len(table), HIDDEN), 77.0)  # llm.c trains these rows too
    parts = [torch.cat([table, padding]), tensors["transformer.wpe.weight"]]
    for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        for kind in ("weight", "bias"):
            of_layers = [tensors[f"transformer.h.{i}.{name}.{kind}"] for i in range(LAYERS)]
            parts += [x.t() if x.ndim == 2 else x for x in of_layers]
    parts += [tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"]]
    _write(path, gpt2_header(VERSIONS[dtype]), parts, dtype)


def write_llama3(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """As on the branch master."""
    parts = [tensors["model.embed_tokens.weight"]]
    for name in ("ln_1", "qkv", "proj", "ln_2", "up", "gate", "down"):
        parts += [_llama3_tensor(tensors, name, i) for i in range(LAYERS)]
    parts += [tensors["model.norm.weight"], tensors["lm_head.weight"]]
    _write(path, llama3_header(VERSIONS[dtype]), parts, dtype)


def write_llama3_branch(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """As on the branch llama3."""
    parts = [tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]]
    for names in (("ln_1",), ("qkv",), ("proj",), ("ln_2",), ("up", "gate"), ("down",)):
        weights = [_llama3_tensor(tensors, name, i) for i in range(LAYERS) for name in names]
        parts += [*weights, *(torch.zeros(len(weight)) for weight in weights)]
    parts += [tensors["model.norm.weight"], torch.zeros(HIDDEN)]
    _write(path, llama3_branch_header(VERSIONS[dtype]), parts, dtype)


def _llama3_tensor(tensors: dict[str, Tensor], name: str, layer: int) -> Tensor:
    prefix = f"model.layers.{layer}"
    if name == "qkv":
        query, key, value = (tensors[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv")
        return torch.cat([_adjacent_pairs(query, HEADS), _adjacent_pairs(key, KEY_VALUE_HEADS), value])
    theirs = {
        "ln_1": "input_layernorm",
        "proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "up": "mlp.up_proj",
        "gate": "mlp.gate_proj",
        "down": "mlp.down_proj",
    }
    return tensors[f"{prefix}.{theirs[name]}.weight"]


def _adjacent_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Row i and row i + d/2 of each head one after the other, as in Meta's own files."""
    rows = []
    for head in weight.chunk(num_heads):
        half = len(head) // 2
        for i in range(half):
            rows += [head[i], head[i + half]]
    return torch.stack(rows)


def _write(path: Path, start: bytes, parts: list[Tensor], dtype: torch.dtype) -> None:
    flat = torch.cat([part.detach().to(dtype).flatten() for part in parts])
    path.write_bytes(start + flat.view(torch.uint8).numpy().tobytes())
