"""The four products of a linear layer, `y = x Wᵀ + b`, on this rank alone. No communication here.

Any number of dims may stand between the first and the last; `N` is their product with the first.

| | computes | shapes |
|---|---|---|
| `forward` | `y = x Wᵀ (+ b)` | x `[…, I]`, W `[O, I]`, b `[O]` → y `[…, O]` |
| `dgrad` | `dx = dy W` | dy `[…, O]` → dx `[…, I]` |
| `wgrad` | `dW = dyᵀ x` | dW `[O, I]` |
| `bias_grad` | `db = Σ dy` | db `[O]` |

`forward` and `dgrad` write into a given contiguous `out`, so that a pipeline fills its rows without concatenation. The
input may be the same rows of several shards, `[shards, n, …]` with a stride between them.
"""

import torch
from torch import Tensor

_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


def _rows(x: Tensor) -> Tensor:
    """`[…, K]` as the matrix `[N, K]`."""
    return x.flatten(0, -2)


def _multiply(x: Tensor, matrix: Tensor, *, bias: Tensor | None, out: Tensor) -> None:
    """`x [… , K]` times `[K, M]`, plus the bias, into `out`; as a batch where the first dim is strided, not copied."""
    if x.ndim > 2 and x.stride(0) != x.shape[1] * x.stride(1):
        batch, matrices = x.flatten(1, -2), matrix.expand(x.shape[0], *matrix.shape)
        if bias is None:
            torch.bmm(batch, matrices, out=out.flatten(1, -2))
        else:
            torch.baddbmm(bias, batch, matrices, out=out.flatten(1, -2))
    elif bias is None:
        torch.mm(_rows(x), matrix, out=_rows(out))
    else:
        torch.addmm(bias, _rows(x), matrix, out=_rows(out))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """Write `x Wᵀ (+ b)` into `out`."""
    _multiply(x, weight.t(), bias=bias, out=out)


def dgrad(dy: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """Write the input's gradient `dy W` into `out`."""
    _multiply(dy, weight, bias=None, out=out)


def wgrad(dy: Tensor, x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The weight's gradient `dyᵀ x` in the given dtype; on CUDA it leaves the product in float32 unrounded."""
    dy_t = _rows(dy).t()
    if dy.is_cuda and dtype == torch.float32 and dy.dtype != dtype:
        return torch.mm(dy_t, _rows(x), out_dtype=dtype)
    return torch.mm(dy_t, _rows(x)).to(dtype)


def accumulate_wgrad(dy: Tensor, x: Tensor, *, main_grad: Tensor) -> None:
    """Add `dyᵀ x` to `main_grad [O, I]` in its dtype, straight from the product where the device can."""
    dy_t, x = _rows(dy).t(), _rows(x)
    if dy.dtype == main_grad.dtype:
        torch.addmm(main_grad, dy_t, x, out=main_grad)
    elif dy.is_cuda:
        torch.addmm(main_grad, dy_t, x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(torch.mm(dy_t, x))


def bias_grad(dy: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The bias's gradient, `dy` summed over all dims but the last, accumulated and returned in `dtype`."""
    return _rows(dy).sum(dim=0, dtype=dtype)


def cast_for_autocast(x: Tensor) -> Tensor:
    """`x` in autocast's dtype, inside autocast and where autocast would cast; else `x` itself."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype in _AUTOCAST_FROM:
        return x.to(torch.get_autocast_dtype(device))
    return x
