"""Column- and row-parallel linear as one autograd Function, synchronous and overlapped alike.

Shapes are this rank's: `S` sequence, `…` any dims, `I` and `O` the layer's full input and output size, R the TP size.
In names a lower-case `s` marks the sequence shard `[S/R, …]`, a capital `S` the whole sequence.

| | Column, W `[O/R, I]`, b `[O/R]` | Row, W `[O, I/R]`, b `[O]` |
|---|---|---|
| forward | gather x `[S/R, …, I]` | `y = x Wᵀ`, scatter to `[S/R, …, O]` |
| | `y = x Wᵀ + b`, `[S, …, O/R]` | `y + b` |
| backward | gather x again | gather dy `[S/R, …, O]` |
| dgrad | `dx = dy W`, scatter to `[S/R, …, I]` | `dx = dy W`, `[S, …, I/R]` |
| wgrad | `dW = dyᵀ x` | `dW = dyᵀ x` |
| bias | `db = Σ dy` | `db = Σ dy`, over the gathered dy |
| kept for wgrad | its shard of x, R times less than x; or the gathered x, if the plan says so | x as it came |

"Gather" and "scatter" are done by the methods of the layer's plan (`shiplap.overlap.plan`): overlapped, one after the
other, or, without sequence parallelism, nothing and an all-reduce. `y = x Wᵀ` stands for whatever the pattern's `Gemm`
computes, which may also need less of x to be kept.

Inputs are kept in the dtype that they were multiplied in, and only if the weight needs a gradient; the weight is kept
as the parameter itself. What overlaps changes nothing in this.

Order: every rank communicates in the order in which this file does it: Column backward first gathers x, then scatters
dx; or, where wgrad is pipelined, the other way round. All ranks have the same plan. On CUDA everything runs on the
current stream, which must be the one that the inputs were made on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiplap.dist.collectives import Group, Handle, size_of
from shiplap.dist.hooks import restore_scope, save_scope
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.overlap.primitives import (
    Method,
    Region,
    Tile,
    gather_and_consume,
    prefetch,
    produce_and_scatter,
    rows_of,
)
from shiplap.overlap.registry import REPLICATED
from shiplap.tensor_parallel.gemm import DENSE, Gemm, RegionGemm, bias_grad, cast_for_autocast
from shiplap.tensor_parallel.wgrad import Wgrad, WgradInParts

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ColumnPattern:
    """Column parallel: gather the input, multiply; backward the other way round.

    `complete` makes whole a gradient of weight or bias, some of whose rows several ranks hold.
    """

    plan: ColumnPlan
    group: Group
    gemm: Gemm = DENSE
    complete: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_s: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """`[S/R, …, I]` to `[S, …, O/R]`, and what to keep for wgrad, if asked to."""
        gemm, features = self.gemm.to(weight.dtype), self.gemm.kept_features
        gemms = RegionGemm(gemm=gemm, weight=weight, narrow=gemm.of_inputs)
        y_S = _whole_like(x_s, gemm.output_dims(x_s.shape[1:], weight), self.plan.forward, self.group)

        def multiply(region: slice | Tile, x: Tensor) -> None:
            gemms.consume("forward", region, x, into=y_S, bias=bias)

        x_S = gather_and_consume(self.plan.forward, x_s, multiply, group=self.group)
        kept = None
        if keep and features is not None:
            kept = x_S[..., features].contiguous()
        elif keep:
            kept = x_s if self.plan.keeps == "shard" else x_S
        return y_S.to(x_s.dtype), kept

    def backward(
        self,
        dy_S: Tensor,
        kept: Tensor | None,
        weight: Tensor | None,
        *,
        wgrad: Wgrad,
        bias_dtype: torch.dtype | None,
    ) -> Gradients:
        """`[S, …, O/R]` to `[S/R, …, I]`, `[O/R, I]` and `[O/R]`; None for what is not needed."""
        is_whole = self.plan.keeps == "gathered" or self.gemm.kept_features is not None
        x_S = None
        if kept is not None and is_whole:
            x_S = Handle(kept)
        elif kept is not None and self.plan.wgrad.kind.prefetch is not None:
            x_S = prefetch(self.plan.wgrad, kept, group=self.group)
        dx_s = None
        if weight is not None:
            gemm = self.gemm.to(weight.dtype)
            gemms = RegionGemm(gemm=gemm, weight=weight, narrow=gemm.of_inputs)

            def multiply(region: Region, out: Tensor) -> None:
                gemms.produce("dgrad", region, dy_S, out=out)

            shape = torch.Size([dy_S.shape[0], *gemm.input_dims(dy_S.shape[1:], weight)])
            dx_s = produce_and_scatter(self.plan.dgrad, multiply, shape, like=dy_S, group=self.group)
        dw = None
        if x_S is not None:
            dw = wgrad(dy_S, x_S.wait())
        elif kept is not None:
            parts = WgradInParts(wgrad, wgrad.gemm.of_inputs, like=dy_S)

            def add(region: slice | Tile, x: Tensor) -> None:
                parts.add(region, dy_S[rows_of(region)], x)

            gather_and_consume(self.plan.wgrad, kept, add, group=self.group)
            dw = parts.result()
        db = None
        if bias_dtype is not None:
            db = bias_grad(dy_S, dtype=bias_dtype)
            db = db if self.complete is None else self.complete(db)
        return None if dx_s is None else dx_s.wait(), dw, db


@dataclass(frozen=True, kw_only=True)
class RowPattern:
    """Row parallel: multiply, scatter the partial sums; backward the other way round."""

    plan: RowPlan
    group: Group
    gemm: Gemm = DENSE

    complete = None

    def forward(self, x_S: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """`[S, …, I/R]` to `[S/R, …, O]`, and what to keep for wgrad, if asked to."""
        gemm, features = self.gemm.to(weight.dtype), self.gemm.kept_features
        gemms = RegionGemm(gemm=gemm, weight=weight, narrow=gemm.of_outputs)

        def multiply(region: Region, out: Tensor) -> None:
            gemms.produce("forward", region, x_S, out=out)

        shape = torch.Size([x_S.shape[0], *gemm.output_dims(x_S.shape[1:], weight)])
        y_s = produce_and_scatter(self.plan.forward, multiply, shape, like=x_S, group=self.group).wait()
        kept = x_S if features is None else x_S[..., features].contiguous()
        return y_s if bias is None else y_s.add_(bias), kept if keep else None

    def backward(
        self,
        dy_s: Tensor,
        x_S: Tensor | None,
        weight: Tensor | None,
        *,
        wgrad: Wgrad,
        bias_dtype: torch.dtype | None,
    ) -> Gradients:
        """`[S/R, …, O]` to `[S, …, I/R]`, `[O, I/R]` and `[O]`; None for what is not needed."""
        dx_S = gemms = None
        if weight is not None:
            gemm = self.gemm.to(dy_s.dtype)
            gemms = RegionGemm(gemm=gemm, weight=weight, narrow=gemm.of_outputs)
            dx_S = _whole_like(dy_s, gemm.input_dims(dy_s.shape[1:], weight), self.plan.dgrad, self.group)
        parts = None
        if self.plan.wgrad == "parts" and x_S is not None:
            parts = WgradInParts(wgrad, wgrad.gemm.of_outputs, like=dy_s)

        def multiply(region: slice | Tile, dy: Tensor) -> None:
            if gemms is not None and dx_S is not None:
                gemms.consume("dgrad", region, dy, into=dx_S)
            if parts is not None and x_S is not None:
                parts.add(region, dy, x_S[rows_of(region)])

        dy_S = gather_and_consume(self.plan.dgrad, dy_s, multiply, group=self.group)
        dw = None
        if x_S is not None:
            dw = wgrad(dy_S, x_S) if parts is None else parts.result()
        db = None if bias_dtype is None else bias_grad(dy_S, dtype=bias_dtype)
        return None if dx_S is None else dx_S.to(dy_s.dtype), dw, db


def _whole_like(shard: Tensor, dims: tuple[int, ...], method: Method, group: Group) -> Tensor:
    """Memory for the result of a gather's GEMMs: `[S, …]`, of a shard's rows and these other dims.

    GEMMs that add up, of a token's features one after the other, do so in float32 at least: the sum is rounded once,
    as one GEMM's is.
    """
    num_rows = (1 if method == REPLICATED else size_of(group)) * shard.shape[0]
    dtype = torch.promote_types(shard.dtype, torch.float32) if method.kind.cut == "by features" else shard.dtype
    return shard.new_empty(num_rows, *dims, dtype=dtype)


Pattern = ColumnPattern | RowPattern


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """The parallel linear layers' autograd node: autocast, what is saved, and which gradients are needed.

    Named after Megatron-LM's; the communication itself is the pattern's.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pattern: Pattern
    ) -> Tensor:
        """Cast under autocast, save what backward needs, and run the pattern."""
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        compute_x = cast_for_autocast(x).contiguous()
        ctx.pattern, ctx.scope = pattern, save_scope()
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and needs_bias else None
        ctx.wgrad = Wgrad(
            gemm=pattern.gemm,
            shape=weight.shape,
            dtype=weight.dtype,
            main_grad=getattr(weight, "main_grad", None),
            complete=pattern.complete,
        )
        compute_bias = None if bias is None else cast_for_autocast(bias)
        y, kept = pattern.forward(compute_x, cast_for_autocast(weight), compute_bias, keep=needs_weight)
        ctx.save_for_backward(kept, weight if needs_x else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients in the dtypes of the inputs."""
        kept, weight = ctx.saved_tensors
        with restore_scope(ctx.scope):
            dx, dw, db = ctx.pattern.backward(
                dy.contiguous(),
                kept,
                None if weight is None else weight.to(dy.dtype),
                wgrad=ctx.wgrad,
                bias_dtype=ctx.bias_dtype,
            )
        return None if dx is None else dx.to(ctx.x_dtype), dw, db, None


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pattern: Pattern) -> Tensor:
    """A column- or row-parallel linear layer as a function; shapes in the table above.

    Args:
        x: Column `[S/R, …, I]` (without sequence parallelism `[S, …, I]`), Row `[S, …, I/R]`.
        weight: Column `[O/R, I]`, Row `[O, I/R]`. If it has a `main_grad` buffer of its shape, its gradient is added
            there, in the buffer's dtype, and autograd gets none.
        bias: Column `[O/R]`, Row `[O]`, or None.
        pattern: which of the two, with its plan and group.
    """
    result: Tensor = LinearWithGradAccumulationAndAsyncCommunication.apply(x, weight, bias, pattern)
    return result
