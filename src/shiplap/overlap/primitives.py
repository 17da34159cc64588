"""Communication together with the product that uses it or makes it: two primitives, and their methods.

*Gather and consume*: shards `[S/R, …]` of all ranks are gathered; `consume(rows, part)` is called for row ranges of
the whole that together cover it once, as they become available.

*Produce and scatter*: `produce(rows, out)` is called for rows of the whole `[S, …]`, a range of them or the same range
of every shard, and writes this rank's partial result for them into `out`; each rank gets its rows `[S/R, …]` of the sum
over the ranks.

Methods that go by columns pass tiles, some columns of a range of rows.

Those that send from rank to rank may do so "in turns" (`shiplap.dist.pacing`): it is in their name's end, as in
`columns:8 in turns`.

The methods differ in when they call and what runs meanwhile, never in the result's meaning. `sequential` is the
reference. Ideas: Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via decomposition") for
the pipelines; Korthikanti et al. 2022 for the collectives of sequence parallelism.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Pending
from shiplap.dist.hooks import at_site
from shiplap.overlap import (
    bulk,
    by_features,
    by_rows,
    by_shard,
    direct,
    exchange,
    grouped,
    reduce,
    replicated,
    sequential,
)
from shiplap.overlap.method import Method
from shiplap.overlap.regions import Region, Rows, Tile, rows_of, take

__all__ = [
    "Consume",
    "Produce",
    "Region",
    "Rows",
    "Tile",
    "adds_up",
    "gather_and_consume",
    "is_prefetched",
    "prefetch",
    "produce_and_scatter",
    "rows_of",
    "take",
]

Consume = Callable[[slice | Tile, Tensor], None]
Produce = Callable[[Region, Tensor], None]

_GATHER: Mapping[str, Callable[..., Tensor]] = {
    "replicated": replicated.gather_and_consume,
    "sequential": sequential.gather_and_consume,
    "ring": by_shard.gather_and_consume,
    "grouped": grouped.gather_and_consume,
    "columns": by_features.gather_and_consume,
    "tiles": partial(by_features.gather_and_consume, own_apart=True),
}
_SCATTER: Mapping[str, Callable[..., Pending]] = {
    "replicated": replicated.produce_and_scatter,
    "sequential": sequential.produce_and_scatter,
    "bulk": bulk.produce_and_scatter,
    "direct": direct.produce_and_scatter,
    "reduce": reduce.produce_and_scatter,
    "exchange": exchange.produce_and_scatter,
    "pieces": by_rows.produce_and_scatter,
    "columns": by_features.produce_and_scatter,
    "tiles": partial(by_features.produce_and_scatter, own_apart=True),
}
_PREFETCH: Mapping[str, Callable[..., Pending]] = {
    "replicated": replicated.prefetch,
    "sequential": sequential.prefetch,
    "bulk": bulk.prefetch,
    "direct": direct.prefetch,
}
_WITH_NUMBERS = ("ring", "grouped", "exchange", "pieces", "columns", "tiles")
_SENDING = ("ring", "grouped", "exchange", "columns", "tiles", "direct")
_Result = TypeVar("_Result")


def _call(table: Mapping[str, Callable[..., _Result]], method: str, *arguments: object, group: Group) -> _Result:
    """Call a method by its name, with the numbers that stand behind a colon, and with turns if it asks for them."""
    asked = Method.parse(method)
    if asked.name not in table:
        raise ValueError(f"There is no method {method} here; there is {', '.join(table)}.")
    if asked.in_turns and asked.name not in _SENDING:
        raise ValueError(f"The method {asked.name} takes no turns, got {method}.")
    if asked.in_turns and group is not None:
        group = group.in_turns
    if not asked.numbers:
        return table[asked.name](*arguments, group)
    if asked.name not in _WITH_NUMBERS:
        raise ValueError(f"The method {asked.name} takes no numbers, got {method}.")
    if min(asked.numbers) < 0 or max(asked.numbers) == 0:
        raise ValueError(f"The method {asked.name} needs numbers from 0 on, not all of them 0, got {method}.")
    return table[asked.name](*arguments, group, numbers=asked.numbers)


@at_site("gather")
def gather_and_consume(method: str, x_sBH: Tensor, consume: Consume, *, group: Group) -> Tensor:
    """Gather `x_sBH [S/R, …]` and hand it to `consume` as it arrives.

    Returns:
        The whole `[S, …]`, for a caller that has another use for it.

    Raises:
        ValueError: there is no such method, or its numbers do not fit.
    """
    return _call(_GATHER, method, x_sBH, consume, group=group)


@at_site("scatter")
def produce_and_scatter(method: str, produce: Produce, out_SBH: torch.Size, *, like: Tensor, group: Group) -> Pending:
    """Produce partial results of shape `out_SBH`, and sum them over the ranks into each rank's shard.

    Args:
        method: how.
        produce: writes this rank's partial result for a row range.
        out_SBH: shape of the whole result, `[S, …]`; R divides S.
        like: a tensor of the result's dtype and device.
        group: the ranks.

    Returns:
        The shard `[S/R, …]`, which may still be on its way: wait as late as possible.

    Raises:
        ValueError: there is no such method, or its numbers do not fit.
    """
    return _call(_SCATTER, method, produce, out_SBH, like, group=group)


@at_site("prefetch")
def prefetch(method: str, x_sBH: Tensor, *, group: Group) -> Pending:
    """Start gathering `x_sBH [S/R, …]` into `[S, …]` for a product that comes after the next one.

    Raises:
        ValueError: there is no such method.
    """
    return _call(_PREFETCH, method, x_sBH, group=group)


def is_prefetched(method: str) -> bool:
    """Whether a Column layer's `wgrad` site gathers all of x beforehand, rather than under wgrad itself."""
    return Method.parse(method).name in _PREFETCH


def adds_up(method: str) -> bool:
    """Whether a gather hands over the features of a token one after the other, so that their products add up."""
    return Method.parse(method).name in ("columns", "tiles")
