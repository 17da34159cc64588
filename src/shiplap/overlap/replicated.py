"""Tensor parallelism without sequence parallelism: a gather is nothing, a scatter is an all-reduce."""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, all_reduce


def gather_and_consume(x: Tensor, consume: Callable[[slice, Tensor], None], group: Group) -> Tensor:
    """Consume `x`, which every rank holds whole."""
    consume(slice(0, x.shape[0]), x)
    return x


def produce_and_scatter(
    produce: Callable[[slice, Tensor], None], shape: torch.Size, like: Tensor, group: Group
) -> Pending:
    """Produce everything, then sum it over the ranks."""
    out = like.new_empty(shape)
    produce(slice(0, shape[0]), out)
    return Pending(all_reduce(out, group).wait())


def prefetch(x: Tensor, group: Group) -> Pending:
    """Nothing to fetch."""
    return Pending(x)
