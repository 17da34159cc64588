"""What a family of models says of itself. Everything else reads it here, and asks for no family's name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shiplap.config.json_fields import JsonFields
from shiplap.config.model import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a family's blocks are made of, beside their sizes.

    Attributes:
        norm: layer norm or root-mean-square norm.
        positions: learned vectors, added to the embedding; or rotary ones, in attention.
        has_biases: whether the linear layers have them.
        feed_forward: one product and GELU, or two and SwiGLU.
        has_query_key_norm: whether each head's queries and keys are normed.
        has_experts: whether experts stand in the place of the feed-forward layer.
    """

    norm: Literal["layer", "rms"]
    positions: Literal["learned", "rotary"]
    has_biases: bool
    feed_forward: Literal["gelu", "swiglu"]
    has_query_key_norm: bool = False
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One parameter as tensors in files: put one below the other they are the whole parameter.

    Attributes:
        parts: name and number of rows of each; rows of the parameter, dim 0.
        transposed: each stands there as `[I, rows]` instead of `[rows, I]`.
    """

    parts: tuple[tuple[str, int], ...]
    transposed: bool = False


Names = Iterator[tuple[str, Stored]]
"""Parameters by their names here, and where they stand in files."""


def whole(name: str, rows: int, *, transposed: bool = False) -> Stored:
    """A parameter that is one tensor."""
    return Stored(parts=((name, rows),), transposed=transposed)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: as on the command line.
        architecture: what its blocks are made of.
        presets: named sizes, as published; `NAME-debug` is small enough for a laptop.
        model_type: what `transformers` calls it in `config.json`.
        classes: what may stand under `architectures` there; the first is what is written.
        size_names: our sizes by their names there.
        read_sizes: the sizes that such a file says; raises `UserError` for what shiplap does not compute.
        written_sizes: the fields that say these sizes; raises `UserError` where `transformers` has no such model.
        huggingface_names: the parameters as the tensors that `transformers` saves. Tied heads are not stored.
        llmc_names: the parameters as the tensors of llm.c's model files; None where it has no such model.
    """

    name: str
    architecture: Architecture
    presets: Mapping[str, Callable[[], TransformerConfig]]
    model_type: str
    classes: tuple[str, ...]
    size_names: Mapping[str, str]
    read_sizes: Callable[[JsonFields], dict[str, Any]]
    written_sizes: Callable[[TransformerConfig], dict[str, Any]]
    huggingface_names: Callable[[TransformerConfig], Names]
    llmc_names: Callable[[TransformerConfig], Names] | None = None


def debug_sizes(**sizes: object) -> TransformerConfig:
    """Small enough for a laptop, with the byte-level vocabulary (256 bytes and the end of text)."""
    usual: dict[str, object] = {
        "vocab_size": 257,
        "hidden_size": 128,
        "num_layers": 4,
        "num_attention_heads": 8,
        "ffn_hidden_size": 512,
        "max_sequence_length": 256,
    }
    return TransformerConfig(**(usual | sizes))  # type: ignore[arg-type]
