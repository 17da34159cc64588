"""Which rank sits where on the axes of `config.parallel.AXES`. Pure functions.

The order is Megatron-LM's: tensor-parallel ranks are neighbours, then come data-parallel replicas, then pipeline
stages (Narayanan et al. 2021, section 3). Neighbours share a host, where the link is fastest, and tensor parallelism
communicates most.

To add an axis, give it an entry in `AXES` and `ModelParallelConfig` the option that says its size: the mesh, the
groups, the overview and the names of ranks follow.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Self

from shiplap.config.option import UserError
from shiplap.config.parallel import AXES, Axis, ModelParallelConfig


@dataclass(frozen=True)
class RankLayout:
    """How many ranks there are along each axis.

    Attributes:
        axes: slowest-varying first, as in the device mesh.
        shape: number of ranks along each of them.
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, **sizes: int) -> Self:
        """The layout of today's axes with these sizes: `RankLayout.of(dp=2, tp=4)`; 1 along the others."""
        assert sizes.keys() <= {axis.name for axis in AXES}, sizes
        return cls(AXES, tuple(sizes.get(axis.name, 1) for axis in AXES))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks by the name of the axis."""
        return {axis.name: size for axis, size in zip(self.axes, self.shape, strict=True)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.sizes[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on each axis, such as `{"pp": 0, "dp": 1, "tp": 3}`."""
        places = {}
        for name, size in reversed(self.sizes.items()):
            rank, places[name] = divmod(rank, size)
        return {axis.name: places[axis.name] for axis in self.axes}

    def rank(self, **coordinates: int) -> int:
        """The rank that sits at these coordinates, one for each axis."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + coordinates[name]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along one axis: lists of ranks that differ in that coordinate only."""
        others = {name: range(size) for name, size in self.sizes.items() if name != axis}
        return [
            [self.rank(**dict(zip(others, fixed, strict=True)), **{axis: place}) for place in range(self.size(axis))]
            for fixed in product(*others.values())
        ]

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, that each read data of their own."""
        return prod(size for axis, size in zip(self.axes, self.shape, strict=True) if axis.divides == "batch")

    def data_rank(self, rank: int) -> int:
        """Which of the `data_size` parts of the data a rank reads."""
        places, part = self.coordinates(rank), 0
        for axis in self.axes:
            if axis.divides == "batch":
                part = part * self.size(axis.name) + places[axis.name]
        return part

    def is_in_first_replica(self, rank: int) -> bool:
        """Whether the rank is one of those that hold the first copy of the model: these save it and sample from it."""
        places = self.coordinates(rank)
        return all(places[axis.name] == 0 for axis in self.axes if axis.replicates_weights)

    def topology(self) -> str:
        """The sizes in a few words, fastest-varying first: `TP 2 × DP 4 × PP 1`."""
        return " × ".join(f"{name.upper()} {size}" for name, size in reversed(self.sizes.items()))

    def rank_name(self, rank: int) -> str:
        """A rank and where it sits: `rank 5 (tp 1, dp 2, pp 0)`."""
        places = ", ".join(f"{name} {place}" for name, place in reversed(self.coordinates(rank).items()))
        return f"rank {rank} ({places})"

    def overview(self) -> str:
        """All groups as text, one axis a line."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        width = max(len(axis.title) for axis in self.axes)
        lines = [f"{ranks}: {self.topology()}"]
        for axis in reversed(self.axes):
            groups = " ".join("[" + " ".join(map(str, group)) + "]" for group in self.groups(axis.name))
            lines.append(f"  {axis.title:<{width}} {groups}")
        return "\n".join(lines)


def layout_for(config: ModelParallelConfig, world_size: int) -> RankLayout:
    """Divide the world over the axes; the axis without an option of its own takes what the others leave.

    Raises:
        UserError: `world_size` is not a multiple of the other axes' sizes.
    """
    needed = config.model_parallel_size
    if world_size % needed:
        sizes = config.chosen_sizes
        # The axis that takes what is left comes last.
        names = " × ".join(axis.name.upper() for axis in sorted(reversed(config.AXES), key=lambda a: a.option is None))
        raise UserError(
            f"The world has {world_size} rank{'s' if world_size > 1 else ''}, which is not a multiple of "
            f"{' × '.join(sizes)} = {' × '.join(map(str, sizes.values()))} = {needed}. Start as many ranks as {names} "
            "(torchrun --nproc-per-node, or --nproc), or change these flags."
        )
    left = world_size // needed
    return RankLayout(
        config.AXES, tuple(left if axis.option is None else getattr(config, axis.option) for axis in config.AXES)
    )
