"""Pipelines by columns: what travels while a product runs is some of the features of all tokens.

A pipeline by rows makes products of few rows, each of which reads the whole weight. Here a product has all rows and a
part of the weight, so that short sequences can be cut into several pieces. A gather's products are added up; a
scatter's are independent, as in DeepSpeed's Domino (Wang et al. 2024).

Nothing hides a gather's first piece and a scatter's last one. With `own_apart` the own rows, which need no
communication, are a product of their own that does; the others' rows then have one or two products a piece. That pays
where a shard has many rows.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending, PendingColumns, PendingSum, send_to_each
from shiplap.dist.group import RankGroup
from shiplap.overlap.regions import Region, Tile

_WIDE = 64
_ALIGNED = 8
"""Columns: products are efficient at multiples of the first, and the grouped ones of CUDA need multiples of the second
in bfloat16."""


def gather_and_consume(
    x_sBH: Tensor,
    consume: Callable[[slice | Tile, Tensor], None],
    group: Group,
    *,
    numbers: Sequence[int] = (4,),
    own_apart: bool = False,
) -> Tensor:
    """Send everything in pieces of columns and consume them one by one, after the own rows if they are apart."""
    assert group is not None, "sending needs a group"
    shard_rows = x_sBH.shape[0]
    x_SBH = x_sBH.new_empty(group.size * shard_rows, *x_sBH.shape[1:])
    shards = x_SBH.split(shard_rows)
    shards[group.rank].copy_(x_sBH)
    arriving = []
    for columns in column_pieces(x_sBH.shape[-1], numbers):
        piece = x_sBH[..., columns].contiguous()
        arriving.append((columns, send_to_each([piece] * group.size, group=group)))
    own = _own_rows(group, shard_rows)
    if own_apart:
        consume(own, x_SBH[own])
    for columns, parts in arriving:
        for source, part in parts.items():
            shards[source][..., columns] = part.wait()
        for rows in _others(own, len(x_SBH)) if own_apart else [slice(0, len(x_SBH))]:
            consume(Tile(rows, columns), x_SBH[rows][..., columns])
    return x_SBH


def produce_and_scatter(
    produce: Callable[[Region, Tensor], None],
    shape: torch.Size,
    like: Tensor,
    group: Group,
    *,
    numbers: Sequence[int] = (4,),
    own_apart: bool = False,
) -> Pending:
    """Produce pieces of columns and start sending each, then the own rows if they are apart."""
    assert group is not None, "sending needs a group"
    own = _own_rows(group, shape[0] // group.size)
    pieces: list[tuple[slice, dict[int, Pending]]] = []
    for columns in column_pieces(shape[-1], numbers):
        piece = like.new_empty(*shape[:-1], columns.stop - columns.start)
        for rows in _others(own, shape[0]) if own_apart else [slice(0, shape[0])]:
            produce(Tile(rows, columns), piece[rows])
        parts = send_to_each(piece.split(shape[0] // group.size), group=group)
        pieces.append((columns, parts | {group.rank: Pending(piece[own])}))
    if own_apart:
        own_sBH = like.new_empty(shape[0] // group.size, *shape[1:])
        produce(own, own_sBH)
        for columns, parts in pieces:
            parts[group.rank] = Pending(own_sBH[..., columns])
    return PendingColumns([PendingSum([parts[rank] for rank in range(group.size)]) for _, parts in pieces])


def column_pieces(width: int, numbers: Sequence[int]) -> list[slice]:
    """Pieces of these proportions, or so many equal ones if it is one number; fewer where there are few columns."""
    proportions = [1] * numbers[0] if len(numbers) == 1 else list(numbers)
    unit = _WIDE if width >= _WIDE * len(proportions) else _ALIGNED
    ends = [total * (width // unit) // sum(proportions) * unit for total in accumulate(proportions)]
    ends[-1] = width
    return [slice(start, stop) for start, stop in pairwise((0, *ends)) if start < stop]


def _own_rows(group: RankGroup, shard_rows: int) -> slice:
    return slice(group.rank * shard_rows, (group.rank + 1) * shard_rows)


def _others(own: slice, num_rows: int) -> list[slice]:
    """The rows before the own ones, and those after them."""
    ranges = [slice(0, own.start), slice(own.stop, num_rows)]
    return [rows for rows in ranges if rows.start < rows.stop]
