"""The GEMMs of a parallel linear layer, on this rank alone: any rows of the sequence, without communication.

A pattern (`shiplap.tensor_parallel.function`) decides which rows come when, and calls its `Gemm` for them. So whatever
is a `Gemm` runs under every overlap method. `DenseGemm` is the ordinary one, `y = x Wᵀ (+ b)`; experts and low-rank
adapters bring their own.

Any number of dims may stand between the first and the last; `N` is their product with the first.

| | computes | shapes |
|---|---|---|
| `linear_forward` | `y = x Wᵀ (+ b)` | x `[…, I]`, W `[O, I]`, b `[O]` → y `[…, O]` |
| `linear_dgrad` | `dx = dy W` | dy `[…, O]` → dx `[…, I]` |
| `linear_wgrad` | `dW = dyᵀ x` | dW `[O, I]` |
| `bias_grad` | `db = Σ dy` | db `[O]` |

The first three write into a given `out`, so that a pipeline fills its part of it without concatenation; that of
`linear_wgrad` may be any features of any rows of a gradient, the others' is contiguous. The input of `linear_forward`
and `linear_dgrad` may be the same rows of several shards, `[shards, n, …]` with a stride between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from shiplap.dist.hooks import record_gemm
from shiplap.overlap.primitives import Region, Rows, Tile, rows_of, take

Dims = tuple[int, ...]
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


def _rows(x: Tensor) -> Tensor:
    """`[…, K]` as the matrix `[N, K]`."""
    return x.flatten(0, -2)


def _multiply(x: Tensor, matrix: Tensor, *, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """`x [… , K]` times `[K, M]`, plus the bias or `out`, into `out`; as a batch if the first dim is strided."""
    if x.ndim <= 2 or x.stride(0) == x.shape[1] * x.stride(1):
        x, out = _rows(x), _rows(out)
        _multiply_matrices(x, matrix, start=out if add else bias, out=out)
        return
    x, matrices, out = x.flatten(1, -2), matrix.expand(x.shape[0], *matrix.shape), out.flatten(1, -2)
    start = out if add else bias
    if start is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(start, x, matrices, out=out)


def _multiply_matrices(a: Tensor, b: Tensor, *, start: Tensor | None, out: Tensor) -> None:
    """`a b`, added to `start`, into `out` in its dtype: straight from the GEMM where the device can."""
    if a.dtype == out.dtype:
        if start is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(start, a, b, out=out)
    elif a.is_cuda:
        if start is None:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(start.to(out.dtype), a, b, out_dtype=out.dtype, out=out)
    elif start is None:
        out.copy_(torch.mm(a, b))
    else:
        torch.add(start.to(out.dtype), torch.mm(a, b), out=out)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor, add: bool = False) -> None:
    """Write `x Wᵀ (+ b)` into `out`, or add it, without a bias, to what is there."""
    _multiply(x, weight.t(), bias=bias, out=out, add=add)


def linear_dgrad(dy: Tensor, weight: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Write the input's gradient `dy W` into `out`, or add it to what is there."""
    _multiply(dy, weight, bias=None, out=out, add=add)


def linear_wgrad(dy: Tensor, x: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Write the weight's gradient `dyᵀ x` into `out [O, I]`, or add it to what is there, in the dtype of `out`."""
    _multiply_matrices(_rows(dy).t(), _rows(x), start=out if add else None, out=out)


def bias_grad(dy: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The bias's gradient, `dy` summed over all dims but the last, accumulated and returned in `dtype`."""
    return _rows(dy).sum(dim=0, dtype=dtype)


def cast_for_autocast(x: Tensor) -> Tensor:
    """`x` in autocast's dtype, inside autocast and where autocast would cast; else `x` itself."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype in _AUTOCAST_FROM:
        return x.to(torch.get_autocast_dtype(device))
    return x


class Gemm(Protocol):
    """`y = x Wᵀ (+ b)`, or what stands in its place.

    `rows` says which rows of the sequence `x` or `dy` holds: GEMMs that treat tokens differently need it. Rows of
    several shards have one more dim in front, the shards; `out` is contiguous all the same.

    Attributes:
        kept_features: None: for wgrad the input is kept as it came, a Column layer's as its sequence shard. Else only
            these of its features are, of the whole sequence, and nothing is gathered in backward.
    """

    @property
    def kept_features(self) -> slice | None:
        """See above."""

    def to(self, dtype: torch.dtype) -> Self:
        """The same with the weights that it holds itself in this dtype."""

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """The output's dims after the first, from the input's."""

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """The input's dims after the first, from the output's."""

    def of_inputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """The GEMM of these features of the input, and its weight: a view, so that a gradient can be narrowed too."""

    def of_outputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """The GEMM that makes these features of the output, and its weight, a view as well."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """Write the output of these rows, in the dtype of `out`; or add it, without a bias, to what is there."""

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the input's gradient of these rows, in the dtype of `out`; or add it to what is there."""

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the weight's gradient that comes from these rows, in the dtype of `out`; or add it to what is there."""


@dataclass(frozen=True)
class DenseGemm:
    """`y = x Wᵀ (+ b)`: the same for all tokens."""

    kept_features: slice | None = None

    def to(self, dtype: torch.dtype) -> "DenseGemm":
        """Itself: it holds no weight."""
        return self

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """`[…, I]` to `[…, O]`."""
        return *x_dims[:-1], weight.shape[0]

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """`[…, O]` to `[…, I]`."""
        return *y_dims[:-1], weight.shape[1]

    def of_inputs(self, weight: Tensor, features: slice) -> "tuple[DenseGemm, Tensor]":
        """Columns of W."""
        return self, weight[:, features]

    def of_outputs(self, weight: Tensor, features: slice) -> "tuple[DenseGemm, Tensor]":
        """Rows of W."""
        return self, weight[features]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """`x Wᵀ (+ b)`."""
        linear_forward(x, weight, bias, out=out, add=add)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dy W`."""
        linear_dgrad(dy, weight, out=out, add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dyᵀ x`."""
        linear_wgrad(dy, x, out=out, add=add)


DENSE = DenseGemm()
Narrow = Callable[[Tensor, slice], tuple[Gemm, Tensor]]
"""`of_inputs` or `of_outputs` of a `Gemm`."""


@dataclass(frozen=True, kw_only=True)
class RegionGemm:
    """Forward or dgrad of regions of the sequence, as the overlap primitives call for them.

    Attributes:
        gemm: of all features.
        weight: of all features.
        narrow: by the tensor that travels: `gemm.of_inputs` where it is x or dx, `gemm.of_outputs` where it is y or dy.
    """

    gemm: Gemm
    weight: Tensor
    narrow: Narrow

    def consume(
        self,
        site: Literal["forward", "dgrad"],
        region: slice | Tile,
        part: Tensor,
        *,
        into: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """From a part that has arrived, to the same rows of the whole `into`. Features of a token add up there."""
        gemm, weight, rows = self.gemm, self.weight, rows_of(region)
        add = isinstance(region, Tile) and not region.is_first
        if isinstance(region, Tile):
            gemm, weight = self.narrow(weight, region.features)
        with record_gemm(site):
            if site == "forward":
                gemm.forward(part, weight, None if add else bias, rows=rows, out=into[rows], add=add)
            else:
                gemm.dgrad(part, weight, rows=rows, out=into[rows], add=add)

    def produce(self, site: Literal["forward", "dgrad"], region: Region, whole: Tensor, *, out: Tensor) -> None:
        """From the same rows of the whole input or its gradient, to a part that will leave."""
        gemm, weight, rows = self.gemm, self.weight, region
        if isinstance(rows, Tile):
            gemm, weight = self.narrow(weight, rows.features)
            rows = rows.rows
        with record_gemm(site):
            if site == "forward":
                gemm.forward(take(whole, rows), weight, None, rows=rows, out=out)
            else:
                gemm.dgrad(take(whole, rows), weight, rows=rows, out=out)
