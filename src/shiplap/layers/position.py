"""Learned absolute positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group
from shiplap.comm.mappings import split_to_shard
from shiplap.tensor_parallel.linear import Init


class LearnedPositions(nn.Module):
    """One vector per position, the same on all ranks; each adds those of its own tokens."""

    def __init__(self, num_positions: int, hidden_size: int, *, group: Group, init: Init) -> None:
        """Make the table `[P, H]`.

        Args:
            num_positions: P.
            hidden_size: H.
            group: the ranks that each hold a shard of the sequence; None where this rank holds all of it.
            init: fills the table.
        """
        super().__init__()
        self.group = group
        with torch.no_grad():
            self.weight = nn.Parameter(init(torch.empty(num_positions, hidden_size)))

    def forward(self, sequence_length: int, padded_length: int) -> Tensor:
        """The vectors `[S/R, 1, H]` of this rank's tokens, S the padded length; zero where it pads.

        Raises:
            ValueError: the sequence is longer than the table.
        """
        if sequence_length > self.weight.shape[0]:
            raise ValueError(f"A sequence of {sequence_length} tokens, but there are {self.weight.shape[0]} positions.")
        vectors_SH = F.pad(self.weight[:sequence_length], (0, 0, 0, padded_length - sequence_length))
        # Its backward gathers every rank's rows: the table's gradient is complete on all ranks.
        return split_to_shard(vectors_SH, self.group)[:, None, :]
