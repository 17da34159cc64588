"""Communication together with the product that uses it or makes it: two primitives, and their methods.

*Gather and consume*: shards `[S/R, …]` of all ranks are gathered; `consume(rows, part)` is called for row ranges of
the whole that together cover it once, as they become available.

*Produce and scatter*: `produce(rows, out)` is called for row ranges of the whole `[S, …]` and writes this rank's
partial result for them into `out`; each rank gets its rows `[S/R, …]` of the sum over the ranks.

The methods differ in when they call and what runs meanwhile, never in the result's meaning. `sequential` is the
reference. Ideas: Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via decomposition") for
the pipelines; Korthikanti et al. 2022 for the collectives of sequence parallelism.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.comm.collectives import Group, Pending
from shiplap.comm.overlap import bulk, exchange, reduce, replicated, ring, sequential
from shiplap.comm.plan import GatherMethod, PrefetchMethod, ScatterMethod

Consume = Callable[[slice, Tensor], None]
Produce = Callable[[slice, Tensor], None]


_GatherAndConsume = Callable[[Tensor, Consume, Group], Tensor]
_ProduceAndScatter = Callable[[Produce, torch.Size, Tensor, Group], Pending]

_GATHER: dict[GatherMethod, _GatherAndConsume] = {
    "replicated": replicated.gather_and_consume,
    "sequential": sequential.gather_and_consume,
    "ring": ring.gather_and_consume,
}
_SCATTER: dict[ScatterMethod, _ProduceAndScatter] = {
    "replicated": replicated.produce_and_scatter,
    "sequential": sequential.produce_and_scatter,
    "bulk": bulk.produce_and_scatter,
    "reduce": reduce.produce_and_scatter,
    "exchange": exchange.produce_and_scatter,
}
_PREFETCH: dict[PrefetchMethod, Callable[[Tensor, Group], Pending]] = {
    "replicated": replicated.prefetch,
    "sequential": sequential.prefetch,
    "bulk": bulk.prefetch,
}


def gather_and_consume(method: GatherMethod, x_sBH: Tensor, consume: Consume, *, group: Group) -> Tensor:
    """Gather `x_sBH [S/R, …]` and hand it to `consume` as it arrives.

    Returns:
        The whole `[S, …]`, for a caller that has another use for it.
    """
    return _GATHER[method](x_sBH, consume, group)


def produce_and_scatter(
    method: ScatterMethod, produce: Produce, out_SBH: torch.Size, *, like: Tensor, group: Group
) -> Pending:
    """Produce partial results of shape `out_SBH`, and sum them over the ranks into each rank's shard.

    Args:
        method: how.
        produce: writes this rank's partial result for a row range.
        out_SBH: shape of the whole result, `[S, …]`; R divides S.
        like: a tensor of the result's dtype and device.
        group: the ranks.

    Returns:
        The shard `[S/R, …]`, which may still be on its way: wait as late as possible.
    """
    return _SCATTER[method](produce, out_SBH, like, group)


def prefetch(method: PrefetchMethod, x_sBH: Tensor, *, group: Group) -> Pending:
    """Start gathering `x_sBH [S/R, …]` into `[S, …]` for a product that comes after the next one."""
    return _PREFETCH[method](x_sBH, group)
