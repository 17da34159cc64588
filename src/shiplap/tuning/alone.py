"""A part of a model as one rank computes it, without the others: what is left of it is arithmetic."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shiplap.layers.moe import MixtureOfExperts
from shiplap.tensor_parallel.gemm import cast_for_autocast
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_Module = TypeVar("_Module", bound=nn.Module)


def sharing(module: _Module) -> _Module:
    """A copy of a module that uses the same memory."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def without_communication(module: _Module, num_shards: int) -> _Module:
    """A copy that uses the same memory and computes what this rank does, with random numbers for what others send.

    No layer has other ranks. So a Column layer takes the whole sequence and a Row layer gives it, and before and after
    them one turns into the other without any copying.
    """
    alone = sharing(module)
    buffers: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def whole_like(shape: torch.Size, like: Tensor) -> Tensor:
        if (shape, like.dtype) not in buffers:
            buffers[shape, like.dtype] = torch.randn(shape, device=like.device).to(like.dtype)
        return buffers[shape, like.dtype]

    def take_whole(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Any, ...]:
        shard, *others = arguments
        # Before it is gathered, as layers do.
        shard = cast_for_autocast(shard)
        whole = whole_like(torch.Size([num_shards * shard.shape[0], *shard.shape[1:]]), shard)
        return _TakeWhole.apply(shard, whole), *others

    def give_shard(_: nn.Module, arguments: object, result: Any) -> Any:
        y = result[0] if isinstance(result, tuple) else result
        shard = _GiveShard.apply(y, whole_like(y.shape, y), num_shards)
        return (shard, *result[1:]) if isinstance(result, tuple) else shard

    for child in alone.modules():
        if isinstance(child, ColumnParallelLinear | RowParallelLinear):
            child.plan = type(child.plan)()
        if hasattr(child, "group"):
            setattr(child, "group", None)  # noqa: B010 - mypy does not know which modules have one
    for child in alone.modules():
        # Experts as a whole: what their router decides, both of their layers must know.
        is_whole = isinstance(child, MixtureOfExperts)
        belongs_to_experts = any(
            child in (other.fc1, other.fc2) for other in alone.modules() if isinstance(other, MixtureOfExperts)
        )
        if is_whole or (isinstance(child, ColumnParallelLinear) and not belongs_to_experts):
            child.register_forward_pre_hook(take_whole)
        if is_whole or (isinstance(child, RowParallelLinear) and not belongs_to_experts):
            child.register_forward_hook(give_shard)
    return alone


class _TakeWhole(torch.autograd.Function):
    """From a shard to a whole tensor that is there already; in backward, of its gradient the first shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor) -> Tensor:
        ctx.num_rows = shard.shape[0]
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.num_rows], None


class _GiveShard(torch.autograd.Function):
    """From a whole tensor to its first shard; in backward, a whole gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, grad: Tensor, num_shards: int) -> Tensor:
        ctx.grad = grad
        return whole[: whole.shape[0] // num_shards]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grad, None, None
