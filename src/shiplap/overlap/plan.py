"""What overlaps at one layer, and how: the switches, resolved.

A parallel linear layer communicates at these sites, each done by one method of `shiplap.overlap.primitives`:

| layer | site | communication | product it can hide behind |
|---|---|---|---|
| Column | `forward` | all-gather of x | forward |
| Column | `dgrad` | reduce-scatter of dx | dgrad itself (pipelined), or wgrad (bulk) |
| Column | `wgrad` | all-gather of x, again | dgrad (bulk) |
| Row | `forward` | reduce-scatter of y | forward |
| Row | `dgrad` | all-gather of dy, used by wgrad too | dgrad |

The methods, as strings; some take numbers after a colon:

| method | sites | what it does |
|---|---|---|
| `sequential` | all | one after the other |
| `bulk` | `dgrad`, `wgrad` of Column | one collective, behind the product next to it |
| `direct` | `dgrad`, `wgrad` of Column | the same straight from rank to rank |
| `ring`, `ring:c` | gathers, Column `wgrad` | round a ring, each shard behind the product before it; c chunks a shard |
| `grouped`, `grouped:1,1,2` | gathers | straight from rank to rank; so many shards a product, the own one first |
| `exchange`, `exchange:c` | scatters | straight from rank to rank, one sum in rank order; c chunks a shard |
| `reduce` | scatters | a reduction to each rank in turn |
| `pieces`, `pieces:2,1,1` | scatters | a part of all shards at a time, in these proportions: a product, a collective |
| `columns`, `columns:8`, `columns:3,2,2,1` | gathers, scatters | so many columns of all rows at a time |
| `tiles`, `tiles:8`, … | gathers, scatters | the same, with the own rows apart |

Those that send from rank to rank may take turns, as in `columns:8 in turns`: no rank sends to two others at once. Where
Gloo's transfers would meet at the receivers, that is faster; NCCL does it anyway.

The switches' pipelines are `ring` and `exchange`; the others come with a replaced plan. With `reduce` shards leave in
the same order on all ranks, so that one rank's own comes first and hides nothing (docs/experiments.md).

What a Column layer keeps for wgrad is a choice too: its `shard` of x, which is gathered again in backward, or x as it
was `gathered` in forward, R times as much memory and no second gather.

A Row layer's gathered dy serves wgrad too, which is computed as a `whole` after dgrad, or in the same `parts`: then the
gather hides behind both.

Without sequence parallelism every site is `replicated`: activations are whole on each rank, so a gather is nothing
and a scatter is an all-reduce.
"""

from dataclasses import dataclass, field
from typing import Literal

from shiplap.config.parallel import ModelParallelConfig

Keeps = Literal["shard", "gathered"]
Parts = Literal["whole", "parts"]


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """The methods at a column-parallel layer's three sites, and what it keeps for wgrad.

    `is_measured` says whose choice they are, for reports; it changes nothing.
    """

    forward: str = "replicated"
    dgrad: str = "replicated"
    wgrad: str = "replicated"
    keeps: Keeps = "shard"
    is_measured: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """The methods at a row-parallel layer's two sites, and how wgrad is computed; `is_measured` as above."""

    forward: str = "replicated"
    dgrad: str = "replicated"
    wgrad: Parts = "whole"
    is_measured: bool = field(default=False, compare=False, repr=False)


def column_plan(config: ModelParallelConfig, *, disable_pipeline: bool = False) -> ColumnPlan:
    """What the switches mean for a column-parallel layer.

    Args:
        config: the switches.
        disable_pipeline: this layer asks for no pipelines (the forward all-gather's and the dgrad's); bulk overlap
            is not touched.
    """
    if not config.sequence_parallel:
        return ColumnPlan()
    overlap = config.tp_comm_overlap
    pipeline = overlap and not disable_pipeline
    dgrad = "sequential"
    if overlap and config.tp_comm_bulk_dgrad:
        dgrad = "bulk"
    if pipeline and config.tp_comm_overlap_rs_dgrad:
        dgrad = "exchange"
    return ColumnPlan(
        forward="ring" if pipeline and config.tp_comm_overlap_ag else "sequential",
        dgrad=dgrad,
        wgrad="bulk" if overlap and config.tp_comm_bulk_wgrad else "sequential",
        keeps="gathered" if config.tp_comm_keep_gathered else "shard",
    )


def row_plan(config: ModelParallelConfig) -> RowPlan:
    """What the switches mean for a row-parallel layer."""
    if not config.sequence_parallel:
        return RowPlan()
    overlap = config.tp_comm_overlap
    return RowPlan(
        forward="exchange" if overlap and config.tp_comm_overlap_rs else "sequential",
        dgrad="ring" if overlap and config.tp_comm_overlap_ag else "sequential",
    )
