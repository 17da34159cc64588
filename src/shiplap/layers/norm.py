"""Norms of the residual stream, whose parameters every rank holds whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group
from shiplap.comm.mappings import copy_to_all


class LayerNorm(nn.Module):
    """Layer norm over the last dim (Ba et al. 2016).

    Under sequence parallelism a rank sees its own tokens only, so the gradients of weight and bias are summed over the
    group, here, in backward: they leave complete and equal on all ranks.
    """

    def __init__(self, hidden_size: int, *, eps: float, sequence_parallel: bool, group: Group) -> None:
        """Weight 1, bias 0, both `[H]`.

        Args:
            hidden_size: H.
            eps: added to the variance.
            sequence_parallel: whether the input is this rank's shard of the sequence.
            group: the TP ranks.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
        self.group = group if sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        """`[…, H]` to `[…, H]`."""
        weight, bias = copy_to_all(self.weight, self.bias, group=self.group)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)
