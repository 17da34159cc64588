"""Small models of `transformers`, of the sizes of `tests.cases.llmc`. It is imported only when a model is made."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cases.llmc import FFN, HEADS, HIDDEN, KEY_VALUE_HEADS, LAYERS, LENGTH, VOCABULARY


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A float32 model with weights that `dtype` can hold, none of them trivial."""
    made = _gpt2() if family == "gpt2" else _llama_like(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.2
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.to(dtype))
    return made.eval()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=HIDDEN,
        n_positions=LENGTH,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _llama_like(family: str) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True))
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))


def load(folder: Path) -> Any:
    """What `transformers` makes of a folder, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(7))
