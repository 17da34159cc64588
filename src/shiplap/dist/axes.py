"""Which rank sits where: rank <-> (pipeline stage, data-parallel replica, tensor-parallel shard). Pure functions.

The order is Megatron-LM's: tensor-parallel ranks are neighbours, then come data-parallel replicas, then pipeline
stages (Narayanan et al. 2021, section 3). Neighbours share a host, where the link is fastest, and tensor parallelism
communicates most.
"""

from dataclasses import dataclass
from itertools import product

from shiplap.config.option import UserError
from shiplap.config.parallel import ModelParallelConfig

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Sizes of the three axes; slowest-varying first, as in the device mesh."""

    pp: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on each axis: `{"pp": …, "dp": …, "tp": …}`."""
        return {
            "pp": rank // (self.tp * self.dp),
            "dp": rank // self.tp % self.dp,
            "tp": rank % self.tp,
        }

    def rank(self, *, pp: int, dp: int, tp: int) -> int:
        """The rank that sits at these coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along one axis: lists of ranks that differ in that coordinate only."""
        sizes = {name: getattr(self, name) for name in AXES}
        others = [name for name in AXES if name != axis]
        return [
            [self.rank(**dict(zip(others, fixed, strict=True)), **{axis: i}) for i in range(sizes[axis])]
            for fixed in product(*(range(sizes[name]) for name in others))
        ]

    def overview(self) -> str:
        """All groups as text, one axis a line."""
        titles = {"tp": "tensor parallel", "dp": "data parallel", "pp": "pipeline parallel"}
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        lines = [f"{ranks}: TP {self.tp} × DP {self.dp} × PP {self.pp}"]
        for axis, title in titles.items():
            groups = " ".join("[" + " ".join(map(str, group)) + "]" for group in self.groups(axis))
            lines.append(f"  {title:<17} {groups}")
        return "\n".join(lines)


def layout_for(config: ModelParallelConfig, world_size: int) -> RankLayout:
    """Divide the world over the axes; data parallelism takes what TP × PP leaves.

    Raises:
        UserError: `world_size` is not a multiple of TP × PP.
    """
    if world_size % config.model_parallel_size:
        raise UserError(
            f"The world has {world_size} rank{'s' if world_size > 1 else ''}, which is not a multiple of "
            f"--tensor-parallel × --pipeline-parallel = {config.tensor_parallel_size} × "
            f"{config.pipeline_parallel_size} = {config.model_parallel_size}. Start as many ranks as TP × PP × DP "
            "(torchrun --nproc-per-node, or --nproc), or change these two flags."
        )
    return RankLayout(
        pp=config.pipeline_parallel_size,
        dp=world_size // config.model_parallel_size,
        tp=config.tensor_parallel_size,
    )
