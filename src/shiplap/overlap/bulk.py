"""One collective, started now and waited for by the caller, who has another product to run meanwhile."""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, all_gather, reduce_scatter


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce everything at once, then start the reduce-scatter."""
    out_SBH = like.new_empty(shape)
    produce(slice(0, shape[0]), out_SBH)
    return reduce_scatter(out_SBH, group)


def prefetch(x_sBH: Tensor, group: Group) -> Pending:
    """Start the all-gather."""
    return all_gather(x_sBH, group)
