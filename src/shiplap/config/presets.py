"""Named model sizes, as published."""

from collections.abc import Callable
from functools import partial

from shiplap.config.model import RopeScaling, TransformerConfig
from shiplap.config.option import UserError

_LLAMA3_SCALING = RopeScaling(factor=8.0)
_LLAMA32_SCALING = RopeScaling(factor=32.0)


def _debug(**family: object) -> TransformerConfig:
    """Small enough for a laptop, with the byte-level vocabulary (256 bytes and the end of text)."""
    sizes: dict[str, object] = {
        "vocab_size": 257,
        "hidden_size": 128,
        "num_layers": 4,
        "num_attention_heads": 8,
        "ffn_hidden_size": 512,
        "max_sequence_length": 256,
    }
    return TransformerConfig(**(sizes | family))  # type: ignore[arg-type]


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


def _llama3(
    *, layers: int, hidden: int, heads: int, ffn: int, scaling: RopeScaling, tied: bool = False
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


def _qwen3(*, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> TransformerConfig:
    """Qwen3: Yang et al. 2025, table 1, and the released configurations."""
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


def _mixtral() -> TransformerConfig:
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


PRESETS: dict[str, dict[str, Callable[[], TransformerConfig]]] = {
    "gpt2": {
        "gpt2-debug": _debug,
        "gpt2-124m": lambda: _gpt2(12, 768, 12),
        "gpt2-355m": lambda: _gpt2(24, 1024, 16),
        "gpt2-774m": lambda: _gpt2(36, 1280, 20),
        "gpt2-1.5b": lambda: _gpt2(48, 1600, 25),
    },
    "llama3": {
        "llama3-debug": partial(
            _debug, num_key_value_heads=4, rope_theta=500000.0, rope_scaling=_LLAMA3_SCALING, tie_embeddings=False
        ),
        "llama3-1b": partial(_llama3, layers=16, hidden=2048, heads=32, ffn=8192, scaling=_LLAMA32_SCALING, tied=True),
        "llama3-3b": partial(_llama3, layers=28, hidden=3072, heads=24, ffn=8192, scaling=_LLAMA32_SCALING, tied=True),
        "llama3-8b": partial(_llama3, layers=32, hidden=4096, heads=32, ffn=14336, scaling=_LLAMA3_SCALING),
        "llama3-70b": partial(_llama3, layers=80, hidden=8192, heads=64, ffn=28672, scaling=_LLAMA3_SCALING),
    },
    "qwen3": {
        "qwen3-debug": partial(_debug, num_key_value_heads=4, head_dim=32, rope_theta=1000000.0, norm_epsilon=1e-6),
        "qwen3-0.6b": partial(_qwen3, layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
        "qwen3-1.7b": partial(_qwen3, layers=28, hidden=2048, heads=16, ffn=6144, tied=True),
        "qwen3-4b": partial(_qwen3, layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
        "qwen3-8b": partial(_qwen3, layers=36, hidden=4096, heads=32, ffn=12288),
        "qwen3-14b": partial(_qwen3, layers=40, hidden=5120, heads=40, ffn=17408),
        "qwen3-32b": partial(_qwen3, layers=64, hidden=5120, heads=64, ffn=25600),
    },
    "mixtral": {
        "mixtral-debug": partial(
            _debug,
            num_key_value_heads=4,
            ffn_hidden_size=256,
            rope_theta=1000000.0,
            tie_embeddings=False,
            num_experts=4,
            router_aux_loss_coefficient=0.02,
        ),
        "mixtral-8x7b": _mixtral,
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
