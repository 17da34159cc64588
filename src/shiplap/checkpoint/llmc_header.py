"""The header of llm.c's model files: which model it is, and which tensor stands where.

The format (karpathy/llm.c: `write_model` and `write_tensors` of `train_gpt2.py` and `train_llama3.py`, and the C code
that reads and writes it, `train_gpt2.cu` and, on its branch llama3, `train_llama3.cu`), little-endian: 256 int32, then
the tensors in one dtype, those of a block stacked over the layers. Version 3 is float32, version 5 bfloat16.

| family | magic | int32 number 2 and on |
|---|---|---|
| GPT-2 | 20240326 | T, V, layers, heads, H, padded V |
| LLaMA 3, branch master | 20240803 | T, V, layers, heads, kv heads, H, a, m, eps, theta, scaled, batch, 3, minor |
| LLaMA 3, branch llama3 | 20240803 | T, V, layers, heads, kv heads, H, m, scaled, 3, minor |

T is the longest sequence, V the vocabulary; a and m are `ffn_dim_multiplier` and `multiple_of`, whence llm.c has the
feed-forward size; minor is the version after the point.

Linear weights are `[out, in]`; QKV holds all queries, all keys, all values. LLaMA's rotary pairs stand next to each
other, as in Meta's own files, so rows of queries and keys are in another order than Hugging Face's; `c_fc` is the way
up and `c_fc2` the gate; the output head is always there.

Branch llama3 adds 256 float32 with a, eps and theta, and writes GPT-2's tensors: a bias after every weight, which it
does not use; the output head where the positions were; `c_fc` and `c_fc2` of a layer together. The other header cuts
a = 1.3 to 1 and eps = 1e-5 to 0. So here the feed-forward size follows from the size of the file.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from shiplap.config.model import RopeScaling, TransformerConfig
from shiplap.config.option import UserError

_HEADER_BYTES = 4 * 256
_GPT2, _LLAMA3 = 20240326, 20240803
_OTHER_FILES = {
    20240520: "tokens, for --input-bin",
    20240801: "tokens, for --input-bin",
    20240327: "a debug state: gradients, not weights",
    20240328: "a tokenizer",
    20240527: "the state of an optimizer",
}
_DTYPES = {3: "float32", 5: "bfloat16"}

# Tensors as they follow each other in the file: how often, for each layer, and which, with `{i}` for the layer.
Stretch = tuple[int, list[tuple[str, tuple[int, ...]]]]
Order = Iterator[Stretch]


class LlmcTensor(NamedTuple):
    """Where a tensor stands: its first element, counted from the first of the whole file's, and its shape."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LlmcHeader:
    """What the header of a model file says.

    Attributes:
        family: `gpt2` or `llama3`.
        config: the model's sizes.
        dtype: of all tensors, `float32` or `bfloat16`.
        num_bytes: of the header; the tensors follow it.
        has_interleaved_heads: whether the two elements of a rotary pair stand next to each other.
        tensors: by the name that they have in llm.c's Python; only those that the model uses, and of a padded
            embedding only the rows that stand for tokens.
    """

    family: str
    config: TransformerConfig
    dtype: str
    num_bytes: int
    has_interleaved_heads: bool
    tensors: Mapping[str, LlmcTensor]


def read_llmc_header(path: str | Path, *, family: str | None = None) -> LlmcHeader:
    """Read the header, and check it against the size of the file.

    Args:
        path: the file.
        family: what the model must be; None: whatever the file says.

    Raises:
        UserError: the file is missing, truncated or too long, is no model file of a known version, or holds a model
            of another family.
    """
    header = _read(path)
    if family not in (None, header.family):
        raise UserError(
            f"{path} holds a {header.family} model, not {family}. Use `shiplap train {header.family}`, or another file."
        )
    return header


def _read(path: str | Path) -> LlmcHeader:
    try:
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            start = file.read(2 * _HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}.") from None
    if size < _HEADER_BYTES:
        raise UserError(f"{path}: truncated: {size} bytes, where the header alone takes {_HEADER_BYTES}.")
    ints = struct.unpack_from("<256i", start)
    _check_kind(path, *ints[:2])
    try:
        if ints[0] == _GPT2:
            return _gpt2_header(path, ints, size=size)
        return _llama3_header(path, ints, start, size=size)
    except _NoModelError as error:
        raise UserError(f"{path}: its header makes no model: {error} Write or copy the file again.") from None


class _NoModelError(ValueError):
    """Numbers in a header that cannot be sizes."""


def _check_kind(path: str | Path, magic: int, version: int) -> None:
    if magic in _OTHER_FILES:
        raise UserError(f"{path}: not a model file: its magic number {magic} says that it holds {_OTHER_FILES[magic]}.")
    if magic not in (_GPT2, _LLAMA3):
        raise UserError(
            f"{path}: not a model file of llm.c: its magic number is {magic}, not {_GPT2} (GPT-2) or {_LLAMA3} "
            "(LLaMA 3)."
        )
    if version not in _DTYPES:
        raise UserError(
            f"{path}: version {version}, where 3 (float32) and 5 (bfloat16) can be read. Write it again with llm.c as "
            "it is now."
        )


def _gpt2_header(path: str | Path, ints: tuple[int, ...], *, size: int) -> LlmcHeader:
    length, vocabulary, layers, heads, hidden, padded = ints[2:8]
    config = _sizes(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        max_sequence_length=length,
    )
    if padded < vocabulary:
        raise _NoModelError(f"the padded vocabulary of {padded} is smaller than the vocabulary of {vocabulary}.")
    expected = _HEADER_BYTES + _num_bytes(_gpt2_order(config, padded), ints[1])
    if size != expected:
        raise UserError(
            f"{path}: {'truncated' if size < expected else 'too long'}: the sizes in its header make {expected} bytes, "
            f"but it has {size} bytes. Write or copy it again."
        )
    tensors = _places(_gpt2_order(config, padded))
    tensors["transformer.wte.weight"] = LlmcTensor(0, (vocabulary, hidden))
    return LlmcHeader(
        family="gpt2",
        config=config,
        dtype=_DTYPES[ints[1]],
        num_bytes=_HEADER_BYTES,
        has_interleaved_heads=False,
        tensors=tensors,
    )


def _llama3_header(path: str | Path, ints: tuple[int, ...], start: bytes, *, size: int) -> LlmcHeader:
    length, vocabulary, layers, heads, key_value_heads, hidden = ints[2:8]
    order: Callable[[TransformerConfig], Order]
    if ints[14] == 3:
        multiple, scaled, minor = ints[9], ints[12], ints[15]
        epsilon, theta = 1e-5, float(ints[11])  # the only epsilon that llm.c uses
        num_bytes, order = _HEADER_BYTES, _llama3_order
    elif ints[10] == 3 and len(start) == 2 * _HEADER_BYTES:
        multiple, scaled, minor = ints[8], ints[9], ints[11]
        # The shortest decimal number that is this float32: 1e-05, not 9.999999747378752e-06.
        epsilon, theta = (float(f"{number:.7g}") for number in struct.unpack_from("<2f", start, _HEADER_BYTES + 4))
        num_bytes, order = 2 * _HEADER_BYTES, _llama3_order_with_biases
    else:
        raise _NoModelError(f"there is no major version 3, neither {ints[14]} nor {ints[10]} is.")
    # Only the export of published weights writes 3.2, and those need 32, though llm.c itself runs them with 8.
    scaling = RopeScaling(factor=32.0 if minor == 2 else 8.0)
    config = _sizes(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        ffn_hidden_size=multiple,
        max_sequence_length=length,
        norm_epsilon=epsilon,
        rope_theta=theta,
        rope_scaling=scaling if scaled else None,
        tie_embeddings=False,
    )
    if config.head_size % 2:
        raise _NoModelError(f"heads of odd size {config.head_size} have no rotary pairs.")
    config = _with_ffn_size(path, config, order, payload=size - num_bytes, version=ints[1])
    tensors = {name: place for name, place in _places(order(config)).items() if not name.endswith(".bias")}
    return LlmcHeader(
        family="llama3",
        config=config,
        dtype=_DTYPES[ints[1]],
        num_bytes=num_bytes,
        has_interleaved_heads=True,
        tensors=tensors,
    )


def _sizes(**sizes: object) -> TransformerConfig:
    try:
        return TransformerConfig(**sizes)  # type: ignore[arg-type]
    except UserError as error:
        raise _NoModelError(str(error)) from None


def _with_ffn_size(
    path: str | Path,
    config: TransformerConfig,
    order: Callable[[TransformerConfig], Order],
    *,
    payload: int,
    version: int,
) -> TransformerConfig:
    """The feed-forward size, of which `config` has the smallest unit, that makes the tensors take `payload` bytes."""
    unit = config.ffn_hidden_size
    one, two = (_num_bytes(order(replace(config, ffn_hidden_size=n * unit)), version) for n in (1, 2))
    more_units, rest = divmod(payload - one, two - one)
    if rest or more_units < 0:
        near = [one + n * (two - one) for n in (max(more_units, 0), max(more_units + 1, 0))]
        raise UserError(
            f"{path}: truncated or too long: {payload} bytes follow its header. With the sizes in it, and a "
            f"feed-forward size that is a multiple of {unit}, it would be {' or '.join(map(str, dict.fromkeys(near)))}."
            " Write or copy it again."
        )
    return replace(config, ffn_hidden_size=(1 + more_units) * unit)


def _num_bytes(order: Order, version: int) -> int:
    num_elements = sum(count * sum(prod(shape) for _, shape in tensors) for count, tensors in order)
    return num_elements * (4 if _DTYPES[version] == "float32" else 2)


def _places(order: Order) -> dict[str, LlmcTensor]:
    places, start = {}, 0
    for count, tensors in order:
        for i in range(count):
            for name, shape in tensors:
                places[name.format(i=i)] = LlmcTensor(start, shape)
                start += prod(shape)
    return places


def _once(name: str, shape: tuple[int, ...]) -> Stretch:
    return 1, [(f"transformer.{name}", shape)]


def _stacked(config: TransformerConfig, kind: str, *tensors: tuple[str, tuple[int, ...]]) -> Stretch:
    """The weights or the biases of each layer, one layer after the other."""
    return config.num_layers, [
        (f"transformer.h.{{i}}.{name}.{kind}", shape if kind == "weight" else shape[:1]) for name, shape in tensors
    ]


def _gpt2_order(config: TransformerConfig, padded_vocab_size: int) -> Order:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    yield _once("wte.weight", (padded_vocab_size, hidden))
    yield _once("wpe.weight", (config.max_sequence_length, hidden))
    for tensor in (
        ("ln_1", (hidden,)),
        ("attn.c_attn", (3 * hidden, hidden)),
        ("attn.c_proj", (hidden, hidden)),
        ("ln_2", (hidden,)),
        ("mlp.c_fc", (ffn, hidden)),
        ("mlp.c_proj", (hidden, ffn)),
    ):
        yield _stacked(config, "weight", tensor)
        yield _stacked(config, "bias", tensor)
    yield _once("ln_f.weight", (hidden,))
    yield _once("ln_f.bias", (hidden,))


def _llama3_blocks(config: TransformerConfig) -> list[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    return [
        ("ln_1", (hidden,)),
        ("attn.c_attn", ((config.num_attention_heads + 2 * config.key_value_heads) * config.head_size, hidden)),
        ("attn.c_proj", (hidden, hidden)),
        ("ln_2", (hidden,)),
        ("mlp.c_fc", (ffn, hidden)),
        ("mlp.c_fc2", (ffn, hidden)),
        ("mlp.c_proj", (hidden, ffn)),
    ]


def _llama3_order(config: TransformerConfig) -> Order:
    table = (config.vocab_size, config.hidden_size)
    yield _once("wte.weight", table)
    for tensor in _llama3_blocks(config):
        yield _stacked(config, "weight", tensor)
    yield _once("ln_f.weight", (config.hidden_size,))
    yield 1, [("lm_head.weight", table)]


def _llama3_order_with_biases(config: TransformerConfig) -> Order:
    table = (config.vocab_size, config.hidden_size)
    yield _once("wte.weight", table)
    yield 1, [("lm_head.weight", table)]
    ln_1, qkv, proj, ln_2, up, gate, down = _llama3_blocks(config)
    for together in ([ln_1], [qkv], [proj], [ln_2], [up, gate], [down]):
        yield _stacked(config, "weight", *together)
        yield _stacked(config, "bias", *together)
    yield _once("ln_f.weight", (config.hidden_size,))
    yield _once("ln_f.bias", (config.hidden_size,))
