"""How one parameter is divided over the TP ranks: the one description that everything else reads.

A rank's shard is some ranges of the full parameter along one dim, one after the other. A fused parameter consists of
blocks, each divided by itself: gate and up, say, so that a rank's product is `[gate | up]`; or all queries, all keys,
all values, so that it is `[q | k | v]` of the rank's own heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shiplap.dist.collectives import Group, all_reduce, rank_in, receive, send, size_of


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of a parameter that is divided by itself.

    A rank holds every unit that its even share touches. So where R does not divide the number of units, ranks share
    some: each has the key-value heads that its query heads need, and R may exceed the number of heads.

    Attributes:
        size: of the stretch along the divided dim.
        unit: what stays together, such as the rows of a head; divides `size`.
    """

    size: int
    unit: int = 1

    def range_of(self, rank: int, num_shards: int) -> range:
        """The rank's range of the stretch."""
        num_units = self.size // self.unit
        start, stop = rank * num_units // num_shards, -(-(rank + 1) * num_units // num_shards)
        return range(start * self.unit, stop * self.unit)

    def is_shared(self, num_shards: int) -> bool:
        """Whether some unit is held by several ranks."""
        return self.size // self.unit % num_shards != 0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The division of one parameter.

    Attributes:
        full_shape: shape of the whole parameter.
        dim: the dim that is divided.
        blocks: the stretches of `dim` that are divided by themselves. By default the whole of it is split evenly, and
            where R does not divide it, the last shards are filled up with zeros.
        multiple: without `blocks`, the size of every shard along `dim` is a multiple of this.
    """

    full_shape: tuple[int, ...]
    dim: int = 0
    blocks: tuple[Block, ...] = ()
    multiple: int = 1

    def __post_init__(self) -> None:
        """Check that the blocks make up the whole dim."""
        size = self.full_shape[self.dim]
        assert not self.blocks or sum(block.size for block in self.blocks) == size, (self.blocks, size)

    def ranges(self, rank: int, num_shards: int) -> tuple[range, ...]:
        """Where along `dim` of the whole parameter the rank's shard comes from, in order; zeros may follow."""
        if not self.blocks:
            rows, size = self._padded_rows(num_shards), self.full_shape[self.dim]
            return (range(min(rank * rows, size), min((rank + 1) * rows, size)),)
        starts = [sum(block.size for block in self.blocks[:i]) for i in range(len(self.blocks))]
        return tuple(
            range(start + part.start, start + part.stop)
            for start, part in zip(starts, (block.range_of(rank, num_shards) for block in self.blocks), strict=True)
        )

    def shard_shape(self, rank: int, num_shards: int) -> tuple[int, ...]:
        """Shape of the rank's shard."""
        shape = [*self.full_shape]
        shape[self.dim] = sum(map(len, self.ranges(rank, num_shards))) if self.blocks else self._padded_rows(num_shards)
        return tuple(shape)

    def shard(self, full: Tensor, rank: int, num_shards: int) -> Tensor:
        """Rank `rank`'s shard of the whole parameter."""
        shard = full.new_zeros(self.shard_shape(rank, num_shards))
        for here, there in self._copies(rank, num_shards):
            _along(shard, self.dim, here).copy_(_along(full, self.dim, there))
        return shard

    def full(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter from all ranks' shards, in rank order; what pads them is left out."""
        full = shards[0].new_empty(self.full_shape)
        for rank, shard in enumerate(shards):
            self.place(full, shard, rank, len(shards))
        return full

    def place(self, full: Tensor, shard: Tensor, rank: int, num_shards: int) -> None:
        """Copy a rank's shard to where it stands in the whole parameter; what pads it is left out."""
        for here, there in self._copies(rank, num_shards):
            _along(full, self.dim, there).copy_(_along(shard, self.dim, here))

    def is_shared(self, num_shards: int) -> bool:
        """Whether some part of the parameter is held by several ranks."""
        return any(block.is_shared(num_shards) for block in self.blocks)

    def counted(self, shard: Tensor, rank: int, num_shards: int) -> list[Tensor]:
        """The parts of a rank's shard that no earlier rank holds: over all ranks every element comes once."""
        if not self.is_shared(num_shards) or rank == 0:
            return [shard]
        parts = []
        earlier = self.ranges(rank - 1, num_shards)
        for (here, there), before in zip(self._copies(rank, num_shards), earlier, strict=True):
            skipped = max(before.stop - there.start, 0)
            parts.append(_along(shard, self.dim, range(here.start + skipped, here.stop)))
        return parts

    def shared_rows(self, rank: int, num_shards: int) -> tuple[list[tuple[range, range]], int]:
        """Where the rank's shard of the blocks that are shared stands in those blocks put one after the other.

        Returns:
            Ranges of the shard, each with its range in the shared blocks; and the size of these along `dim`.
        """
        copies, size = [], 0
        for block, (here, _) in zip(self.blocks, self._copies(rank, num_shards), strict=True):
            if block.is_shared(num_shards):
                part = block.range_of(rank, num_shards)
                copies.append((here, range(size + part.start, size + part.stop)))
                size += block.size
        return copies, size

    def _padded_rows(self, num_shards: int) -> int:
        return -(-self.full_shape[self.dim] // (num_shards * self.multiple)) * self.multiple

    def _copies(self, rank: int, num_shards: int) -> Iterator[tuple[range, range]]:
        """Ranges of the rank's shard, each with its range of the whole parameter."""
        start = 0
        for there in self.ranges(rank, num_shards):
            yield range(start, start + len(there)), there
            start += len(there)


def _along(x: Tensor, dim: int, part: range) -> Tensor:
    return x.narrow(dim, part.start, len(part))


def named_shards(module: nn.Module) -> Iterator[tuple[str, Shard | None]]:
    """Every parameter's name with its division, or None if every rank holds it whole. Shared ones come once."""
    seen: set[int] = set()
    for module_name, owner in module.named_modules():
        shards: dict[str, Shard] = getattr(owner, "shards", {})
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{module_name}.{name}" if module_name else name, shards.get(name)


def shared_by(shard: Shard | None, group: Group) -> Shard | None:
    """The division, where several of the ranks hold some rows; else None: each gradient is this rank's alone."""
    return shard if shard is not None and shard.is_shared(size_of(group)) else None


def sum_shared_rows(grad: Tensor, shard: Shard, group: Group) -> Tensor:
    """Complete the gradient of the rows that several ranks hold, each of which has a part of it; in place.

    Afterwards it is the same on all ranks that hold a row. One message, as large as all shared blocks.

    Args:
        grad: of this rank's shard, divided along dim 0.
        shard: the division of the parameter.
        group: the TP ranks, all of which must call this.
    """
    if not shard.is_shared(size_of(group)):
        return grad
    copies, num_rows = shard.shared_rows(rank_in(group), size_of(group))
    shared = grad.new_zeros(num_rows, *grad.shape[1:])
    for here, there in copies:
        shared[there.start : there.stop] = grad[here.start : here.stop]
    all_reduce(shared, group).wait()
    for here, there in copies:
        grad[here.start : here.stop] = shared[there.start : there.stop]
    return grad


@torch.no_grad()
def gather_to_first(local: Tensor, shard: Shard | None, group: Group) -> Tensor | None:
    """The whole of a divided tensor on the group's first rank, which receives one shard after the other.

    All ranks must call this alike. Only the first holds more than it did: the whole, and one shard.

    Args:
        local: this rank's shard.
        shard: how the tensor is divided; None where every rank holds it whole.
        group: the ranks; their shards may differ in size.

    Returns:
        The whole tensor, on the CPU; on other ranks than the first None.
    """
    if group is not None and group.rank > 0:
        if shard is not None:
            send(local.detach().contiguous(), 0, group).wait()
        return None
    if shard is None:
        return local.detach().to("cpu", copy=True)
    num_shards = 1 if group is None else group.size
    whole = local.new_empty(shard.full_shape, device="cpu")
    shard.place(whole, local, 0, num_shards)
    if group is not None:
        for rank in range(1, num_shards):
            part = receive(local.new_empty(shard.shard_shape(rank, num_shards)), rank, group).wait()
            shard.place(whole, part, rank, num_shards)
    return whole
