"""Which part of a sequence: a range of rows, the same range of every rank's shard, or some columns of a range."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ShardRows:
    """Rows `start` to `stop` of each of the `num_shards` shards that the sequence consists of."""

    num_shards: int
    start: int
    stop: int


@dataclass(frozen=True)
class Tile:
    """These columns, of the last dim, in these rows. Of the same rows tiles come from left to right."""

    rows: slice
    columns: slice

    @property
    def is_first(self) -> bool:
        """Whether no columns come before these."""
        return self.columns == slice(0, self.columns.stop)


Rows = slice | ShardRows
Region = Rows | Tile


def rows_of(region: slice | Tile) -> slice:
    """All rows of a region, whole or not."""
    return region.rows if isinstance(region, Tile) else region


def take(x: Tensor, rows: Rows) -> Tensor:
    """These rows of `x [S, …]`, without a copy: `[n, …]`, or `[shards, n, …]` of several shards."""
    if isinstance(rows, slice):
        return x[rows]
    shards: Tensor = x.unflatten(0, (rows.num_shards, -1))
    return shards[:, rows.start : rows.stop]
