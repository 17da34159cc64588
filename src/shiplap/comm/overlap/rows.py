"""Which rows of a sequence: a range of them, or the same range of every rank's shard."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ShardRows:
    """Rows `start` to `stop` of each of the `num_shards` shards that the sequence consists of."""

    num_shards: int
    start: int
    stop: int


Rows = slice | ShardRows


def take(x: Tensor, rows: Rows) -> Tensor:
    """These rows of `x [S, …]`, without a copy: `[n, …]`, or `[shards, n, …]` of several shards."""
    if isinstance(rows, slice):
        return x[rows]
    shards: Tensor = x.unflatten(0, (rows.num_shards, -1))
    return shards[:, rows.start : rows.stop]
