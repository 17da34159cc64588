"""Where a rank's part of a parameter stands in the whole: the one description that everything else reads.

A placement says, for each axis of ranks that divides a parameter, how. From it follow the shape of a rank's part, its
regions of the whole (as checkpoints need them), which of its elements other ranks hold as well, and so how gradients
and norms are counted. Along an axis that does not divide it, all ranks hold the same.

A fused parameter consists of blocks, each divided by itself: gate and up, say, so that a rank's product is
`[gate | up]`; or all queries, all keys, all values, so that it is `[q | k | v]` of the rank's own heads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from torch import Tensor

from shiplap.dist.collectives import Group, rank_in, size_of

TP = "tp"
"""The axis along which layers are divided."""


class Coordinate(NamedTuple):
    """A rank's place along one axis.

    Attributes:
        rank: 0 … size - 1.
        size: number of ranks along the axis.
    """

    rank: int
    size: int


Coordinates = Mapping[str, Coordinate]
"""A rank's places, by the name of the axis."""


def along_tp(group: Group) -> Coordinates:
    """This rank's place among the TP ranks."""
    return {TP: Coordinate(rank_in(group), size_of(group))}


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

    def range_of(self, place: Coordinate) -> range:
        """The rank's range of the stretch."""
        num_units = self.size // self.unit
        start, stop = place.rank * num_units // place.size, -(-(place.rank + 1) * num_units // place.size)
        return range(start * self.unit, stop * self.unit)

    def is_shared(self, num_ranks: int) -> bool:
        """Whether some unit is held by several ranks."""
        return self.size // self.unit % num_ranks != 0


class Pair(NamedTuple):
    """A range of a rank's part along one dim, and where it stands in what is divided."""

    here: range
    there: range


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the ranks along one axis divide one dim.

    Attributes:
        dim: the dim.
        blocks: the stretches of it that are divided by themselves. By default the whole of it is split evenly, and
            where the number of ranks does not divide it, the last parts are filled up with zeros.
        multiple: without `blocks`, the size of every part is a multiple of this.
    """

    dim: int = 0
    blocks: tuple[Block, ...] = ()
    multiple: int = 1

    def length(self, size: int, place: Coordinate) -> int:
        """Size of the rank's part of a dim of this size, zeros included."""
        if self.blocks:
            return sum(len(block.range_of(place)) for block in self.blocks)
        return -(-size // (place.size * self.multiple)) * self.multiple

    def pairs(self, size: int, place: Coordinate, *, owned: bool = False) -> Iterator[Pair]:
        """Where the rank's part of a dim of this size comes from, in order; zeros may follow.

        Args:
            size: of the dim.
            place: of the rank.
            owned: leave out what an earlier rank holds as well.
        """
        if not self.blocks:
            length = self.length(size, place)
            there = range(min(place.rank * length, size), min((place.rank + 1) * length, size))
            yield Pair(range(len(there)), there)
            return
        here = offset = 0
        for block in self.blocks:
            part = block.range_of(place)
            held = 0
            if owned and place.rank > 0:
                held = max(block.range_of(Coordinate(place.rank - 1, place.size)).stop - part.start, 0)
            yield Pair(range(here + held, here + len(part)), range(offset + part.start + held, offset + part.stop))
            here, offset = here + len(part), offset + block.size

    def is_shared(self, num_ranks: int) -> bool:
        """Whether something is held by several ranks."""
        return any(block.is_shared(num_ranks) for block in self.blocks)

    def shared(self, place: Coordinate) -> tuple[list[Pair], int]:
        """Where the rank's part of the blocks that are shared stands in those blocks put one after the other.

        Returns:
            The pairs; and the size of these blocks together.
        """
        pairs, here, size = [], 0, 0
        for block in self.blocks:
            part = block.range_of(place)
            if block.is_shared(place.size):
                pairs.append(Pair(range(here, here + len(part)), range(size + part.start, size + part.stop)))
                size += block.size
            here += len(part)
        return pairs, size


@dataclass(frozen=True, kw_only=True)
class Region:
    """A box of a rank's part, and where it stands in the whole parameter: one slice for each dim.

    Attributes:
        here: in the part.
        there: in the whole.
    """

    here: tuple[slice, ...]
    there: tuple[slice, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the whole it begins."""
        return tuple(part.start for part in self.there)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(part.stop - part.start for part in self.there)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How one parameter is divided.

    Attributes:
        full_shape: of the whole parameter.
        splits: by the name of the axis; of two that divide the same dim, the second divides what the first leaves.
    """

    full_shape: tuple[int, ...]
    splits: Mapping[str, Split] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the blocks of each split make up the dim."""
        for split in self.splits.values():
            size = self.full_shape[split.dim]
            assert not split.blocks or sum(block.size for block in split.blocks) == size, (split, size)

    def local_shape(self, at: Coordinates) -> tuple[int, ...]:
        """Shape of a rank's part."""
        shape = [*self.full_shape]
        for axis, split in self.splits.items():
            shape[split.dim] = split.length(shape[split.dim], at[axis])
        return tuple(shape)

    def regions(self, at: Coordinates) -> list[Region]:
        """What a rank holds."""
        return self._regions(at, owned=False)

    def owned(self, at: Coordinates) -> list[Region]:
        """What a rank holds and no earlier one does: over all ranks every element of the whole comes once."""
        if any(place.rank > 0 for axis, place in at.items() if axis not in self.splits):
            return []
        return self._regions(at, owned=True)

    def take(self, full: Tensor, at: Coordinates) -> Tensor:
        """A rank's part of the whole parameter, as new memory."""
        part = full.new_zeros(self.local_shape(at))
        for region in self.regions(at):
            part[region.here] = full[region.there]
        return part

    def put(self, full: Tensor, part: Tensor, at: Coordinates) -> None:
        """Copy a rank's part to where it stands in the whole parameter; what pads it is left out."""
        for region in self.regions(at):
            full[region.there] = part[region.here]

    def counted(self, part: Tensor, at: Coordinates) -> list[Tensor]:
        """The stretches of a rank's part, such as its gradient, that count for this rank in a sum over all of them."""
        return [part[region.here] for region in self.owned(at)]

    def _regions(self, at: Coordinates, *, owned: bool) -> list[Region]:
        dims = [self._pairs(dim, at, owned=owned) for dim in range(len(self.full_shape))]
        return [
            Region(here=tuple(_slice(p.here) for p in box), there=tuple(_slice(p.there) for p in box))
            for box in product(*dims)
        ]

    def _pairs(self, dim: int, at: Coordinates, *, owned: bool) -> list[Pair]:
        size = self.full_shape[dim]
        pairs = [Pair(range(size), range(size))]
        for axis, split in self.splits.items():
            if split.dim == dim:
                pairs = list(_within(pairs, split.pairs(size, at[axis], owned=owned)))
                size = split.length(size, at[axis])
        return pairs


def _within(outer: list[Pair], inner: Iterable[Pair]) -> Iterator[Pair]:
    """The pairs `inner`, which stand in what `outer` leaves, in the whole that `outer` stands in."""
    for here, middle in inner:
        for held, there in outer:
            start, stop = max(middle.start, held.start), min(middle.stop, held.stop)
            if start < stop:
                to, source = here.start + start - middle.start, there.start + start - held.start
                yield Pair(range(to, to + stop - start), range(source, source + stop - start))


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
