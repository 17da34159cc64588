"""GEMMs in which every token is multiplied by the weights of its own experts, for the parallel linear layers.

A token has k slots, one for each expert that it goes to; E experts' weights stand one below the other. The slots of
some rows are sorted by expert and multiplied in one grouped GEMM, whose group sizes stay on the device: no host
waits for them. Every slot's result is written to its own place and slots are added up in order, so that results do not
depend on how the device schedules them. Sorting tokens instead of padding experts is MegaBlocks' idea (Gale et al.
2022).

| | in a layer | forward | dgrad | weight |
|---|---|---|---|---|
| `ToExperts` | column-parallel | x `[S, B, I]` → `[S, B, k, O/R]` | sum over the slots | `[E O/R, I]` |
| `FromExperts` | row-parallel | x `[S, B, k, I/R]` → `[S, B, O]`, summed | to every slot | `[E O, I/R]` |
"""

from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap.overlap.primitives import Rows, take
from shiplap.tensor_parallel.gemm import Dims


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which experts each token goes to.

    Attributes:
        experts: `[S, B, k]`, of the whole sequence.
        num_experts: E.
    """

    experts: Tensor
    num_experts: int
    _sorted: dict[tuple[int | None, int | None, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """K: experts per token."""
        return self.experts.shape[-1]

    def sorted_slots(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The slots of these rows, numbered from 0, by expert; and where each expert's slots end, `[E]`."""
        key = (rows.start, rows.stop, 1 if isinstance(rows, slice) else rows.num_shards)
        if key not in self._sorted:
            experts = take(self.experts, rows).flatten()
            counts = (experts[:, None] == torch.arange(self.num_experts, device=experts.device)).sum(0)
            self._sorted[key] = experts.argsort(stable=True), counts.cumsum(0).to(torch.int32)
        return self._sorted[key]

    def by_expert(self, weight: Tensor) -> Tensor:
        """`[E O, I]` as `[E, O, I]`, which it may be already."""
        return weight.view(self.num_experts, -1, weight.shape[-1])


def _spread(tokens: Tensor, weights: Tensor, *, to: Assignment, rows: Rows, out: Tensor, add: bool) -> None:
    """Each token `[N, I]` times the weights `[E, I, O]` of its experts, into its slots `[N k, O]`."""
    slots, ends = to.sorted_slots(rows)
    products = F.grouped_mm(tokens[slots // to.num_slots], weights, offs=ends).to(out.dtype)
    out[slots] = out[slots] + products if add else products


def _collect(slots_in: Tensor, weights: Tensor, *, of: Assignment, rows: Rows, out: Tensor, add: bool) -> None:
    """Each slot `[N k, I]` times the weights `[E, I, O]` of its expert, summed into its token `[N, O]`."""
    slots, ends = of.sorted_slots(rows)
    products = slots_in.new_empty(slots_in.shape[0], weights.shape[-1])
    products[slots] = F.grouped_mm(slots_in[slots], weights, offs=ends)
    by_token = products.view(-1, of.num_slots, weights.shape[-1])
    if add:
        out += by_token.sum(dim=1)
    else:
        torch.sum(by_token, dim=1, out=out)


def _wgrad(dy: Tensor, x: Tensor, ends: Tensor, *, out: Tensor, add: bool) -> None:
    """`dyᵀ x` of each expert's slots, both sorted by expert, into `out [E, O, I]`."""
    grad = F.grouped_mm(dy.t(), x, offs=ends)
    if add:
        out += grad
    else:
        out.copy_(grad)


@dataclass(frozen=True, kw_only=True)
class _Experts:
    assignment: Assignment
    kept_features: slice | None = None

    def to(self, dtype: torch.dtype) -> Self:
        """Itself: it holds no weight."""
        return self

    def of_inputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """Columns of every expert's weight."""
        return self, weight[:, features]

    def of_outputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """Rows of every expert's weight, as `[E, O, I]`: they are not together."""
        return self, self.assignment.by_expert(weight)[:, features]


class ToExperts(_Experts):
    """From tokens to slots."""

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """`[B, I]` to `[B, k, O]`."""
        return *x_dims[:-1], self.assignment.num_slots, weight.shape[0] // self.assignment.num_experts

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """`[B, k, O]` to `[B, I]`."""
        return *y_dims[:-2], weight.shape[1]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """`x Wᵀ` for each of a token's experts."""
        assert bias is None
        weights = self.assignment.by_expert(weight).transpose(1, 2)
        _spread(x.flatten(0, -2), weights, to=self.assignment, rows=rows, out=out.flatten(0, -2), add=add)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dy W`, summed over a token's experts."""
        weights = self.assignment.by_expert(weight)
        _collect(dy.flatten(0, -2), weights, of=self.assignment, rows=rows, out=out.flatten(0, -2), add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dyᵀ x` over each expert's tokens."""
        slots, ends = self.assignment.sorted_slots(rows)
        tokens = x.flatten(0, -2)[slots // self.assignment.num_slots]
        _wgrad(dy.flatten(0, -2)[slots], tokens, ends, out=self.assignment.by_expert(out), add=add)


class FromExperts(_Experts):
    """From slots to tokens."""

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """`[B, k, I]` to `[B, O]`."""
        return *x_dims[:-2], weight.shape[0] // self.assignment.num_experts

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """`[B, O]` to `[B, k, I]`."""
        return *y_dims[:-1], self.assignment.num_slots, weight.shape[1]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """`x Wᵀ`, summed over a token's experts."""
        assert bias is None
        weights = self.assignment.by_expert(weight).transpose(1, 2)
        _collect(x.flatten(0, -2), weights, of=self.assignment, rows=rows, out=out.flatten(0, -2), add=add)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dy W` for each of a token's experts."""
        weights = self.assignment.by_expert(weight)
        _spread(dy.flatten(0, -2), weights, to=self.assignment, rows=rows, out=out.flatten(0, -2), add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dyᵀ x` over each expert's tokens."""
        slots, ends = self.assignment.sorted_slots(rows)
        tokens = dy.flatten(0, -2)[slots // self.assignment.num_slots]
        _wgrad(tokens, x.flatten(0, -2)[slots], ends, out=self.assignment.by_expert(out), add=add)
