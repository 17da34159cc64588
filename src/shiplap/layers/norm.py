"""Norms, whose parameters every rank holds whole.

Under sequence parallelism a rank sees its own tokens only, and in attention its own heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import Group
from shiplap.dist.mappings import copy_to_all


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, group: Group) -> None:
        """Weight 1, `[size]`.

        Args:
            size: of the last dim.
            eps: added to the mean square.
            group: the ranks that each see a part of the tokens or heads, over which the weight's gradient is summed
                in backward; None where this rank sees them all.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """`[…, size]` to `[…, size]`, computed in float32 at least."""
        (weight,) = copy_to_all(self.weight, group=self.group)
        return F.rms_norm(x.to(torch.promote_types(x.dtype, weight.dtype)), weight.shape, weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm over the last dim (Ba et al. 2016).

    Its gradients are summed over the group here, in backward: they leave complete and equal on all ranks.
    """

    def __init__(self, hidden_size: int, *, eps: float, group: Group) -> None:
        """Weight 1, bias 0, both `[H]`.

        Args:
            hidden_size: H.
            eps: added to the variance.
            group: the ranks that each see a part of the tokens, over which the gradients are summed; None where this
                rank sees them all.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """`[…, H]` to `[…, H]`."""
        weight, bias = copy_to_all(self.weight, self.bias, group=self.group)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)
