"""Recomputation: what backward computes again instead of keeping it.

Whole blocks: Chen et al. 2016. The attention core only, "selective": Korthikanti et al. 2022, section 5. Overlap stays
on in the recomputed forward: it is the same code.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

_Output = TypeVar("_Output")


def recompute(function: Callable[..., _Output], *inputs: Tensor) -> _Output:
    """`function(*inputs)`, keeping the inputs only."""
    output: _Output = checkpoint(function, *inputs, use_reentrant=False)
    return output
