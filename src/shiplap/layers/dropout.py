"""Dropout that is alike on all TP ranks where they hold the same, and different where each holds a part."""

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import Group
from shiplap.tensor_parallel.random import different_per_rank


class Dropout(nn.Module):
    """Dropout of the residual stream (Srivastava et al. 2014)."""

    def __init__(self, probability: float, *, group: Group) -> None:
        """Nothing to learn.

        Args:
            probability: of an element to be cleared; the others are scaled up.
            group: the ranks that each hold other tokens, and drop differently; None where all hold, and drop, the same.
        """
        super().__init__()
        self.probability = probability
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not self.training or self.probability == 0.0:
            return x
        with different_per_rank(self.group, x.device):
            return F.dropout(x, self.probability)
