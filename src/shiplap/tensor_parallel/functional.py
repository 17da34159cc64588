"""The four products of a linear layer, `y = x Wᵀ + b`, on this rank alone. No communication here.

Any number of dims may stand between the first and the last; `N` is their product with the first.

| | computes | shapes |
|---|---|---|
| `forward` | `y = x Wᵀ (+ b)` | x `[…, I]`, W `[O, I]`, b `[O]` → y `[…, O]` |
| `dgrad` | `dx = dy W` | dy `[…, O]` → dx `[…, I]` |
| `wgrad` | `dW = dyᵀ x` | dW `[O, I]` |
| `bias_grad` | `db = Σ dy` | db `[O]` |

The first three write into a given `out`, so that a pipeline fills its part of it without concatenation; that of `wgrad`
may be any columns of any rows of a gradient, the others' is contiguous. The input of `forward` and `dgrad` may be the
same rows of several shards, `[shards, n, …]` with a stride between them.
"""

import torch
from torch import Tensor

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
    """`a b`, added to `start`, into `out` in its dtype: straight from the product where the device can."""
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


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor, add: bool = False) -> None:
    """Write `x Wᵀ (+ b)` into `out`, or add it, without a bias, to what is there."""
    _multiply(x, weight.t(), bias=bias, out=out, add=add)


def dgrad(dy: Tensor, weight: Tensor, *, out: Tensor, add: bool = False) -> None:
    """Write the input's gradient `dy W` into `out`, or add it to what is there."""
    _multiply(dy, weight, bias=None, out=out, add=add)


def wgrad(dy: Tensor, x: Tensor, *, out: Tensor, add: bool = False) -> None:
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
