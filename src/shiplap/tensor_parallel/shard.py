"""How one parameter is divided over the TP ranks: the one description that everything else reads.

A fused weight is two-dimensional for its product, and says by which view of the full weight one plain split along one
dim expresses its division. Gate and up, say, are `[2, F, H]` split along F, so that a rank's product is `[gate | up]`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The division of one parameter.

    Attributes:
        full_shape: shape of the whole parameter.
        dim: the dim of `view` that is split evenly; where R does not divide it, the last ranks hold zeros.
        multiple: the size of every shard along `dim` is a multiple of this; what is missing is zeros.
        view: the shape in which the whole parameter is split; by default `full_shape`.
    """

    full_shape: tuple[int, ...]
    dim: int = 0
    multiple: int = 1
    view: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the view is one of this parameter."""
        assert prod(self._view) == prod(self.full_shape), (self._view, self.full_shape)

    @property
    def _view(self) -> tuple[int, ...]:
        return self.full_shape if self.view is None else self.view

    def _rows(self, num_shards: int) -> int:
        """Size of one shard along `dim`."""
        return -(-self._view[self.dim] // (num_shards * self.multiple)) * self.multiple

    def shard(self, full: Tensor, rank: int, num_shards: int) -> Tensor:
        """Rank `rank`'s shard of the whole parameter, in the form in which the layer multiplies."""
        viewed = full.reshape(self._view)
        rows, size = self._rows(num_shards), self._view[self.dim]
        start, stop = min(rank * rows, size), min((rank + 1) * rows, size)
        part = viewed.narrow(self.dim, start, stop - start)
        if stop - start < rows:
            missing = [*part.shape]
            missing[self.dim] = rows - (stop - start)
            part = torch.cat([part, part.new_zeros(missing)], dim=self.dim)
        return part.reshape(self.shard_shape(num_shards)).contiguous()

    def full(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter from all ranks' shards, in rank order; what pads them is cut off."""
        shape = [*self._view]
        shape[self.dim] = self._rows(len(shards))
        whole = torch.cat([part.reshape(shape) for part in shards], dim=self.dim)
        return whole.narrow(self.dim, 0, self._view[self.dim]).reshape(self.full_shape)

    def shard_shape(self, num_shards: int) -> tuple[int, ...]:
        """Shape of a shard, in the form in which the layer multiplies."""
        if self.view is None:
            shape = [*self.full_shape]
            shape[self.dim] = self._rows(num_shards)
            return tuple(shape)
        numel = prod(self._view) // self._view[self.dim] * self._rows(num_shards)
        trailing = self.full_shape[1:]
        return numel // prod(trailing), *trailing


def named_shards(module: nn.Module) -> Iterator[tuple[str, Shard | None]]:
    """Every parameter's name with its division, or None if every rank holds it whole. Shared ones come once."""
    seen: set[int] = set()
    for module_name, owner in module.named_modules():
        shards: dict[str, Shard] = getattr(owner, "shards", {})
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{module_name}.{name}" if module_name else name, shards.get(name)
