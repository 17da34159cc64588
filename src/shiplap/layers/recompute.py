"""Recomputation: what backward computes again instead of keeping it.

Whole blocks: Chen et al. 2016. The attention core only, "selective": Korthikanti et al. 2022, section 5. Overlap stays
on in the recomputed forward: it is the same code.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`function(*inputs)`, keeping the inputs only."""
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return output
