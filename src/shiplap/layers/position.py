"""Learned absolute positions."""

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import Group
from shiplap.dist.mappings import split_to_shard
from shiplap.tensor_parallel.linear import Init, new_shard
from shiplap.tensor_parallel.placement import Shard


class LearnedPositions(nn.Module):
    """One vector per position, the same on all ranks; each adds those of its own tokens."""

    def __init__(self, num_positions: int, hidden_size: int, *, group: Group, init: Init | None) -> None:
        """Make the table `[P, H]`.

        Args:
            num_positions: P.
            hidden_size: H.
            group: the ranks that each hold a shard of the sequence; None where this rank holds all of it.
            init: fills the table; None leaves it for a loader to fill.
        """
        super().__init__()
        self.group = group
        self.weight = new_shard(Shard(full_shape=(num_positions, hidden_size)), None, init)

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
