"""Positions: learned ones, added to the embedding, and rotary ones, which turn queries and keys."""

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config.model import RopeScaling
from shiplap.dist.collectives import Group
from shiplap.dist.mappings import split_to_shard
from shiplap.tensor_parallel.parameters import ByName, Init, PlacedModule
from shiplap.tensor_parallel.placement import Placement


class LearnedPositions(PlacedModule):
    """One vector per position, the same on all ranks; each adds those of its own tokens."""

    def __init__(self, num_positions: int, hidden_size: int, *, group: Group, init: Init | ByName) -> None:
        """Make the table `[P, H]`.

        Args:
            num_positions: P.
            hidden_size: H.
            group: the ranks that each hold a shard of the sequence; None where this rank holds all of it.
            init: fills the table.
        """
        super().__init__()
        self.group = group
        self.weight = self.new_parameter("weight", Placement(full_shape=(num_positions, hidden_size)), None, init)

    def forward(self, sequence_length: int, padded_length: int, *, start: int = 0) -> Tensor:
        """The vectors `[S/R, 1, H]` of this rank's tokens, S the padded length; zero where it pads.

        Args:
            sequence_length: number of tokens, without padding.
            padded_length: S.
            start: position of the first token.

        Raises:
            ValueError: the sequence is longer than the table.
        """
        stop = start + sequence_length
        if stop > self.weight.shape[0]:
            raise ValueError(f"A sequence of {stop} tokens, but there are {self.weight.shape[0]} positions.")
        vectors_SH = F.pad(self.weight[start:stop], (0, 0, 0, padded_length - sequence_length))
        # Its backward gathers every rank's rows: the table's gradient is complete on all ranks.
        return split_to_shard(vectors_SH, self.group)[:, None, :]


class RotaryPositions(nn.Module):
    """Turns pairs of a head's elements, `i` and `i + d/2`, by an angle that grows with the position (Su et al. 2021).

    Stretched as LLaMA 3.1 does (Grattafiori et al. 2024; its released code).
    """

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
