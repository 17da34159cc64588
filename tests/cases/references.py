"""The models written again, plainly, on full parameters of any dtype: what the sharded ones must equal.

Parameters go by the sharded model's names. Nothing here comes from `shiplap` but the sizes.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap.config import TransformerConfig

Parameters = dict[str, Tensor]


def _linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[B, heads, S, d]`, as many keys as queries, to `[B, S, heads d]`."""
    sequence = q.shape[2]
    mask = torch.full((sequence, sequence), float("-inf"), dtype=q.dtype).triu(1)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def _split_heads(qkv: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The fused product as queries, keys and values `[B, heads, S, d]`, repeated for the queries that share them."""
    batch, sequence, _ = qkv.shape
    sizes = [heads * config.head_size for heads in (config.num_attention_heads, *2 * (config.key_value_heads,))]
    q, k, v = (x.view(batch, sequence, -1, config.head_size).transpose(1, 2) for x in qkv.split(sizes, dim=-1))
    shared = config.num_attention_heads // config.key_value_heads
    return q, k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)


def gpt2(p: Parameters, tokens: Tensor, config: TransformerConfig) -> Tensor:
    """Logits `[B, S, V]`."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (config.hidden_size,), p[f"{name}.weight"], p[f"{name}.bias"], config.norm_epsilon)

    x = p["embedding.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        qkv = _linear(p, f"{block}.attention.qkv", norm(f"{block}.attention_norm", x))
        x = x + _linear(p, f"{block}.attention.proj", _causal_attention(*_split_heads(qkv, config)))
        y = F.gelu(_linear(p, f"{block}.mlp.fc1", norm(f"{block}.mlp_norm", x)), approximate="tanh")
        x = x + _linear(p, f"{block}.mlp.fc2", y)
    return norm("final_norm", x) @ p["embedding.weight"].t()


def _rope_frequencies(config: TransformerConfig) -> list[float]:
    """Angles per position, one per pair; the three cases of LLaMA 3.1's stretching written out."""
    frequencies = []
    for pair in range(config.head_size // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_size)
        if (scaling := config.rope_scaling) is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_max_sequence_length / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_max_sequence_length / scaling.high_freq_factor:
                smooth = scaling.original_max_sequence_length / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def _turn(x: Tensor, config: TransformerConfig) -> Tensor:
    """Rotary positions by complex multiplication: the pair (i, i + d/2) is one complex number."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor(_rope_frequencies(config), dtype=x.dtype)
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _swiglu(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = (x @ fc1.t()).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ fc2.t()


def _experts(p: Parameters, name: str, x: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Every token through every expert, those that it does not take with weight 0; and what the router made of it."""
    probabilities = (x @ p[f"{name}.router.weight"].t()).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(config.num_experts_per_token).indices, 1.0)
    weights = probabilities * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    fc1 = p[f"{name}.fc1.weight"].chunk(config.num_experts)
    fc2 = p[f"{name}.fc2.weight"].chunk(config.num_experts)
    outputs = [_swiglu(x, w1, w2) * weights[..., i : i + 1] for i, (w1, w2) in enumerate(zip(fc1, fc2, strict=True))]
    return sum(outputs, torch.zeros_like(x)), probabilities, chosen


def mixtral(p: Parameters, tokens: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Logits `[B, S, V]` and the load-balancing loss."""
    routed: list[tuple[Tensor, Tensor]] = []

    def mlp(name: str, x: Tensor) -> Tensor:
        y, probabilities, chosen = _experts(p, name, x, config)
        routed.append((probabilities, chosen))
        return y

    logits = _llama(p, tokens, config, mlp)
    losses = [config.num_experts * (p.mean((0, 1)) * chosen.mean((0, 1))).sum() for p, chosen in routed]
    return logits, config.router_aux_loss_coefficient * torch.stack(losses).mean()


def llama3(p: Parameters, tokens: Tensor, config: TransformerConfig) -> Tensor:
    """Logits `[B, S, V]`; with query and key norms where there are such parameters (Qwen3)."""
    return _llama(p, tokens, config, lambda name, x: _swiglu(x, p[f"{name}.fc1.weight"], p[f"{name}.fc2.weight"]))


def _llama(p: Parameters, tokens: Tensor, config: TransformerConfig, mlp: Callable[[str, Tensor], Tensor]) -> Tensor:

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * p[f"{name}.weight"]

    x = p["embedding.weight"][tokens]
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        q, k, v = _split_heads(_linear(p, f"{block}.attention.qkv", norm(f"{block}.attention_norm", x)), config)
        if f"{block}.attention.query_norm.weight" in p:
            q, k = norm(f"{block}.attention.query_norm", q), norm(f"{block}.attention.key_norm", k)
        context = _causal_attention(_turn(q, config), _turn(k, config), v)
        x = x + _linear(p, f"{block}.attention.proj", context)
        x = x + mlp(f"{block}.mlp", norm(f"{block}.mlp_norm", x))
    head = p.get("head.projection.weight", p["embedding.weight"])
    return norm("final_norm", x) @ head.t()
