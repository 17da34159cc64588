"""The reference: first the collective, then the product, or the other way round. Nothing overlaps."""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, all_gather
from shiplap.overlap import bulk


def gather_and_consume(x_sBH: Tensor, consume: Callable[[slice, Tensor], None], group: Group) -> Tensor:
    """All-gather, then consume everything at once."""
    x_SBH = all_gather(x_sBH, group).wait()
    consume(slice(0, x_SBH.shape[0]), x_SBH)
    return x_SBH


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce everything at once, then reduce-scatter."""
    return Pending(bulk.produce_and_scatter(produce, shape, like, group).wait())


def prefetch(x_sBH: Tensor, group: Group) -> Pending:
    """All-gather, here and now."""
    return Pending(all_gather(x_sBH, group).wait())
