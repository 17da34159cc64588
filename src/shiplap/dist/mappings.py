"""Differentiable communication: what is one thing forward is its conjugate backward.

| mapping | forward | backward | in Shoeybi et al. 2019 / Korthikanti et al. 2022 |
|---|---|---|---|
| `copy_to_all` | identity | all-reduce | f |
| `reduce_from_all` | all-reduce | identity | f̄ (g in Megatron-LM, section 3) |
| `reduce_scatter_to_shard` | reduce-scatter along dim 0 | all-gather | ḡ |
| `gather_from_shard` | all-gather along dim 0 | reduce-scatter | g |
| `split_to_shard` | own rows along dim 0 | all-gather | |
| `gather_last_dim` | all-gather along the last dim | own slice | |

All of them are the identity for `group=None`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiplap.dist.collectives import (
    Group,
    all_gather,
    all_gather_last_dim,
    all_reduce,
    rank_in,
    reduce_scatter,
    size_of,
)
from shiplap.dist.hooks import restore_scope, save_scope


class _CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.scope = group, save_scope()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # One message for all of them: each is small, so latency is what costs.
        flat = torch.cat([grad.flatten() for grad in grads])
        with restore_scope(ctx.scope):
            summed = all_reduce(flat, ctx.group).wait().split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(summed, grads, strict=True))


class _ReduceFromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatterToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.scope = group, save_scope()
        return reduce_scatter(x_SBH, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sBH: Tensor) -> tuple[Tensor, None]:
        with restore_scope(ctx.scope):
            return all_gather(grad_sBH, ctx.group).wait(), None


class _GatherFromShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sBH: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.scope = group, save_scope()
        return all_gather(x_sBH, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor, None]:
        with restore_scope(ctx.scope):
            return reduce_scatter(grad_SBH, ctx.group).wait(), None


class _SplitToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBH: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.scope = group, save_scope()
        return x_SBH.chunk(size_of(group))[rank_in(group)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sBH: Tensor) -> tuple[Tensor, None]:
        with restore_scope(ctx.scope):
            return all_gather(grad_sBH, ctx.group).wait(), None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_last_dim(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(size_of(ctx.group), dim=-1)[rank_in(ctx.group)], None


def copy_to_all(*tensors: Tensor, group: Group) -> tuple[Tensor, ...]:
    """The same tensors; their gradients are summed over the group, in one message.

    For replicated parameters that each rank uses on its own tokens only (a norm's weight under sequence
    parallelism): each rank's gradient is then a part of the whole one.
    """
    if group is None:
        return tensors
    result: tuple[Tensor, ...] = _CopyToAll.apply(group, *tensors)
    return result


def reduce_from_all(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the group, on every rank."""
    return x if group is None else _ReduceFromAll.apply(x, group)


def reduce_scatter_to_shard(x_SBH: Tensor, group: Group) -> Tensor:
    """This rank's rows `[S/R, …]` of the sum of `x_SBH` over the group."""
    return x_SBH if group is None else _ReduceScatterToShard.apply(x_SBH, group)


def gather_from_shard(x_sBH: Tensor, group: Group) -> Tensor:
    """All ranks' rows `[S, …]`, of which each rank may make something else: their gradients are summed."""
    return x_sBH if group is None else _GatherFromShard.apply(x_sBH, group)


def split_to_shard(x_SBH: Tensor, group: Group) -> Tensor:
    """This rank's rows `[S/R, …]` of a tensor that every rank holds whole; R divides S."""
    return x_SBH if group is None else _SplitToShard.apply(x_SBH, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """All ranks' slices `[…, V/R]` side by side, `[…, V]`; every rank must use the result alike."""
    return x if group is None else _GatherLastDim.apply(x, group)
