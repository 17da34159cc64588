"""Rotary positions (Su et al. 2021), stretched as LLaMA 3.1 does (Grattafiori et al. 2024; its released code)."""

from math import pi

import torch
from torch import Tensor, nn

from shiplap.config.model import RopeScaling


class RotaryPositions(nn.Module):
    """Turns pairs of a head's elements, `i` and `i + d/2`, by an angle that grows with the position."""

    frequencies: Tensor

    def __init__(self, head_size: int, *, theta: float, scaling: RopeScaling | None) -> None:
        """Nothing to learn.

        Args:
            head_size: d, even.
            theta: base of the frequencies.
            scaling: how low frequencies are stretched, if they are.
        """
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        if scaling is not None:
            frequencies = _stretch(frequencies, scaling)
        # Not a parameter and not in checkpoints: it follows from the sizes.
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, *heads: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """Queries and keys `[B, heads, S, d]`, turned by their positions `start` … `start + S - 1` along S."""
        positions = torch.arange(start, start + heads[0].shape[2], device=heads[0].device)
        angles = positions[:, None] * self.frequencies.float()
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return tuple(_turn(x, cosine.to(x.dtype), sine.to(x.dtype)) for x in heads)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, leave high ones, and go over smoothly between."""
    turns = scaling.original_max_sequence_length * frequencies / (2 * pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)
