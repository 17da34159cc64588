"""Dropout that is alike on all TP ranks where they hold the same, and different where each holds a part."""

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group
from shiplap.tensor_parallel.random import different_per_rank


class Dropout(nn.Module):
    """Dropout of the residual stream (Srivastava et al. 2014)."""

    def __init__(self, probability: float, *, sequence_parallel: bool, group: Group) -> None:
        """Nothing to learn.

        Args:
            probability: of an element to be cleared; the others are scaled up.
            sequence_parallel: whether each rank holds its own tokens; else all hold the same and drop the same.
            group: the TP ranks.
        """
        super().__init__()
        self.probability = probability
        self.group = group if sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not self.training or self.probability == 0.0:
            return x
        with different_per_rank(self.group, x.device):
            return F.dropout(x, self.probability)
