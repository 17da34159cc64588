"""Named model sizes, as published."""

from collections.abc import Callable

from shiplap.config.errors import UserError
from shiplap.config.model import TransformerConfig


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> TransformerConfig:
    """The GPT-2 family: Radford et al. 2019, table 2; head counts from the released checkpoints."""
    return TransformerConfig(
        vocab_size=50257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        ffn_hidden_size=4 * hidden_size,
        max_sequence_length=1024,
    )


def _gpt2_debug() -> TransformerConfig:
    """Small enough for a laptop, with the byte-level vocabulary (256 bytes and the end of text)."""
    return TransformerConfig(
        vocab_size=257,
        hidden_size=128,
        num_layers=4,
        num_attention_heads=8,
        ffn_hidden_size=512,
        max_sequence_length=256,
    )


PRESETS: dict[str, dict[str, Callable[[], TransformerConfig]]] = {
    "gpt2": {
        "gpt2-debug": _gpt2_debug,
        "gpt2-124m": lambda: _gpt2(12, 768, 12),
        "gpt2-355m": lambda: _gpt2(24, 1024, 16),
        "gpt2-774m": lambda: _gpt2(36, 1280, 20),
        "gpt2-1.5b": lambda: _gpt2(48, 1600, 25),
    },
}


def preset(family: str, name: str) -> TransformerConfig:
    """The sizes of a named model, such as `preset("gpt2", "gpt2-124m")`.

    Raises:
        UserError: the family has no such preset; the message lists those it has.
    """
    try:
        return PRESETS[family][name]()
    except KeyError:
        raise UserError(f"--preset {name}: no such {family} preset; there are {', '.join(PRESETS[family])}.") from None
