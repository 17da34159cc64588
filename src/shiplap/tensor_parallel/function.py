"""Column- and row-parallel linear as one autograd Function, synchronous and overlapped alike.

Shapes are this rank's: `S` sequence, `…` any dims, `I` and `O` the layer's full input and output size, R the TP size.
In names a lower-case `s` marks the sequence shard `[S/R, …]`, a capital `S` the whole sequence.

| | Column, W `[O/R, I]`, b `[O/R]` | Row, W `[O, I/R]`, b `[O]` |
|---|---|---|
| forward | gather x `[S/R, …, I]` | `y = x Wᵀ`, scatter to `[S/R, …, O]` |
| | `y = x Wᵀ + b`, `[S, …, O/R]` | `y + b` |
| backward | gather x again | gather dy `[S/R, …, O]` |
| | `dx = dy W`, scatter to `[S/R, …, I]` | `dx = dy W`, `[S, …, I/R]` |
| | `dW = dyᵀ x`; `db = Σ dy` | `dW = dyᵀ x`; `db = Σ dy`, over the gathered dy |

"Gather" and "scatter" are what the layer's plan says (`shiplap.overlap.plan`): overlapped, one after the other, or,
without sequence parallelism, nothing and an all-reduce.

Kept for backward: Column its shard of x, or the gathered x where the plan says so, Row its x as it came, unless the
product says that it needs less; in the dtype that it was multiplied in, and only if the weight needs a gradient. The
weight is kept as the parameter itself. What overlaps changes nothing in this.

`y = x Wᵀ` stands for whatever the pattern's product computes (`shiplap.tensor_parallel.gemm`).

Order: every rank communicates in the order in which this file does it: Column backward first gathers x, then scatters
dx; or, where wgrad is pipelined, the other way round. All ranks have the same plan. On CUDA everything runs on the
current stream, which must be the one that the inputs were made on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiplap.dist.collectives import Group, Pending, size_of
from shiplap.dist.hooks import is_observed, remembering, resuming
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.overlap.primitives import (
    Region,
    Tile,
    adds_up,
    gather_and_consume,
    is_prefetched,
    prefetch,
    produce_and_scatter,
    rows_of,
    take,
)
from shiplap.tensor_parallel import functional
from shiplap.tensor_parallel.gemm import DENSE, Product, narrowed
from shiplap.tensor_parallel.observed import ObservedProduct
from shiplap.tensor_parallel.placement import Shard
from shiplap.tensor_parallel.shared_rows import sum_shared_rows
from shiplap.tensor_parallel.wgrad import Wgrad, WgradInParts

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ColumnPattern:
    """Column parallel: gather the input, multiply; backward the other way round."""

    plan: ColumnPlan
    group: Group
    product: Product = DENSE
    shared: Shard | None = None
    """The division of weight and bias, where several ranks hold some of their rows."""

    @property
    def complete(self) -> Callable[[Tensor], Tensor] | None:
        """What completes the gradient of weight and bias, where more than the product is needed."""
        shard, group = self.shared, self.group
        return None if shard is None else lambda grad: sum_shared_rows(grad, shard, group)

    def forward(self, x_s: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """`[S/R, …, I]` to `[S, …, O/R]`, and what to keep for wgrad, if asked to."""
        product, columns = self.product.to(weight.dtype), self.product.kept_columns
        num_rows = (1 if self.plan.forward == "replicated" else size_of(self.group)) * x_s.shape[0]
        dtype = _dtype_of_sums(self.plan.forward, x_s.dtype)
        y_S = x_s.new_empty(num_rows, *product.output_dims(x_s.shape[1:], weight), dtype=dtype)

        def multiply(region: slice | Tile, part: Tensor) -> None:
            some, its_weight, rows, add = narrowed(region, product, weight, product.of_inputs)
            some.forward(part, its_weight, None if add else bias, rows=rows, out=y_S[rows], add=add)

        x_S = gather_and_consume(self.plan.forward, x_s, multiply, group=self.group)
        kept = None
        if keep and columns is not None:
            kept = x_S[..., columns].contiguous()
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
        is_gathered = self.plan.keeps == "gathered" or self.product.kept_columns is not None
        x_S = None
        if kept is not None and (is_gathered or is_prefetched(self.plan.wgrad)):
            x_S = Pending(kept) if is_gathered else prefetch(self.plan.wgrad, kept, group=self.group)
        dx_s = None
        if weight is not None:
            product = self.product.to(weight.dtype)

            def multiply(region: Region, out: Tensor) -> None:
                some, its_weight, rows, _ = narrowed(region, product, weight, product.of_inputs)
                some.dgrad(take(dy_S, rows), its_weight, rows=rows, out=out)

            shape = torch.Size([dy_S.shape[0], *product.input_dims(dy_S.shape[1:], weight)])
            dx_s = produce_and_scatter(self.plan.dgrad, multiply, shape, like=dy_S, group=self.group)
        dw = None
        if x_S is not None:
            dw = wgrad(dy_S, x_S.wait())
        elif kept is not None:
            parts = WgradInParts(wgrad, wgrad.product.of_inputs, like=dy_S)

            def add(region: slice | Tile, x: Tensor) -> None:
                parts.add(region, dy_S[rows_of(region)], x)

            gather_and_consume(self.plan.wgrad, kept, add, group=self.group)
            dw = parts.result()
        db = None
        if bias_dtype is not None:
            db = functional.bias_grad(dy_S, dtype=bias_dtype)
            db = db if self.complete is None else self.complete(db)
        return None if dx_s is None else dx_s.wait(), dw, db


@dataclass(frozen=True, kw_only=True)
class RowPattern:
    """Row parallel: multiply, scatter the partial sums; backward the other way round."""

    plan: RowPlan
    group: Group
    product: Product = DENSE

    complete = None

    def forward(self, x_S: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """`[S, …, I/R]` to `[S/R, …, O]`, and what to keep for wgrad, if asked to."""
        product, columns = self.product.to(weight.dtype), self.product.kept_columns

        def multiply(region: Region, out: Tensor) -> None:
            some, its_weight, rows, _ = narrowed(region, product, weight, product.of_outputs)
            some.forward(take(x_S, rows), its_weight, None, rows=rows, out=out)

        shape = torch.Size([x_S.shape[0], *product.output_dims(x_S.shape[1:], weight)])
        y_s = produce_and_scatter(self.plan.forward, multiply, shape, like=x_S, group=self.group).wait()
        kept = x_S if columns is None else x_S[..., columns].contiguous()
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
        product = self.product.to(dy_s.dtype)
        dx_S = None
        if weight is not None:
            num_rows = (1 if self.plan.dgrad == "replicated" else size_of(self.group)) * dy_s.shape[0]
            dtype = _dtype_of_sums(self.plan.dgrad, dy_s.dtype)
            dx_S = dy_s.new_empty(num_rows, *product.input_dims(dy_s.shape[1:], weight), dtype=dtype)

        parts = None
        if self.plan.wgrad == "parts" and x_S is not None:
            parts = WgradInParts(wgrad, wgrad.product.of_outputs, like=dy_s)

        def multiply(region: slice | Tile, part: Tensor) -> None:
            if weight is not None and dx_S is not None:
                some, its_weight, rows, add = narrowed(region, product, weight, product.of_outputs)
                some.dgrad(part, its_weight, rows=rows, out=dx_S[rows], add=add)
            if parts is not None and x_S is not None:
                parts.add(region, part, x_S[rows_of(region)])

        dy_S = gather_and_consume(self.plan.dgrad, dy_s, multiply, group=self.group)
        dw = None
        if x_S is not None:
            dw = wgrad(dy_S, x_S) if parts is None else parts.result()
        db = None if bias_dtype is None else functional.bias_grad(dy_S, dtype=bias_dtype)
        return None if dx_S is None else dx_S.to(dy_s.dtype), dw, db


def _dtype_of_sums(method: str, dtype: torch.dtype) -> torch.dtype:
    """Of a product that a gather may hand over in parts that add up: they are rounded once, as one product is."""
    return torch.promote_types(dtype, torch.float32) if adds_up(method) else dtype


Pattern = ColumnPattern | RowPattern


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """The parallel linear layers' autograd node: autocast, what is saved, and who needs a gradient.

    Named after Megatron-LM's; the communication itself is the pattern's.
    """

    @staticmethod
    @remembering
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pattern: Pattern
    ) -> Tensor:
        """Cast under autocast, save what backward needs, and run the pattern."""
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        compute_x = functional.cast_for_autocast(x).contiguous()
        ctx.pattern = pattern
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and needs_bias else None
        ctx.wgrad = Wgrad(
            product=pattern.product,
            shape=weight.shape,
            dtype=weight.dtype,
            main_grad=getattr(weight, "main_grad", None),
            complete=pattern.complete,
        )
        compute_bias = None if bias is None else functional.cast_for_autocast(bias)
        y, kept = pattern.forward(compute_x, functional.cast_for_autocast(weight), compute_bias, keep=needs_weight)
        ctx.save_for_backward(kept, weight if needs_x else None)
        return y

    @staticmethod
    @once_differentiable
    @resuming
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients in the dtypes of what was passed in."""
        kept, weight = ctx.saved_tensors
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
    if is_observed():
        pattern = replace(pattern, product=ObservedProduct(of=pattern.product))
    result: Tensor = LinearWithGradAccumulationAndAsyncCommunication.apply(x, weight, bias, pattern)
    return result
