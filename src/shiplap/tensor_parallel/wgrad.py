"""The gradient of a parallel layer's weight: from everything at once, or from parts while the rest is on its way."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.dist.hooks import record_gemm
from shiplap.overlap.primitives import Tile, rows_of
from shiplap.tensor_parallel.gemm import Gemm, Narrow

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Wgrad:
    """Where a weight's gradient goes: into its `main_grad` if it has one, else back to autograd.

    Attributes:
        gemm: of the layer.
        shape: of the weight.
        dtype: of the weight.
        main_grad: its buffer, of its shape.
        complete: what completes a gradient that is not this rank's alone.
    """

    gemm: Gemm
    shape: torch.Size
    dtype: torch.dtype
    main_grad: Tensor | None
    complete: Callable[[Tensor], Tensor] | None

    def __call__(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """From the whole sequence at once: what autograd gets."""
        with record_gemm("wgrad"):
            if self.main_grad is not None and self.complete is None:
                self.gemm.wgrad(dy, x, rows=_ALL, out=self.main_grad, add=True)
                return None
            dw = dy.new_empty(self.shape, dtype=self.dtype if self.main_grad is None else self.main_grad.dtype)
            self.gemm.wgrad(dy, x, rows=_ALL, out=dw)
        return self.deliver(dw)

    def deliver(self, dw: Tensor) -> Tensor | None:
        """What autograd gets, of a gradient that is not in `main_grad` yet."""
        dw = dw if self.complete is None else self.complete(dw)
        if self.main_grad is None:
            return dw
        self.main_grad.add_(dw)
        return None


class WgradInParts:
    """A gradient from parts of what is gathered: the gather is hidden behind the GEMMs that use them.

    Parts of rows add up, in float32 at least, and are rounded once. Parts of features are rows or columns of the
    gradient: each adds to itself only.
    """

    def __init__(self, wgrad: Wgrad, narrow: Narrow, like: Tensor) -> None:
        """Of nothing yet.

        Args:
            wgrad: where the gradient goes.
            narrow: to features of what is gathered: the GEMM's `of_inputs` if that is x, `of_outputs` if it is dy.
            like: a tensor on the device.
        """
        self._wgrad, self._narrow = wgrad, narrow
        main_grad = wgrad.main_grad
        if main_grad is not None and wgrad.complete is None:
            self._total, self._begun = main_grad, [_ALL]
        else:
            dtype = torch.promote_types(wgrad.dtype, torch.float32) if main_grad is None else main_grad.dtype
            self._total, self._begun = like.new_empty(wgrad.shape, dtype=dtype), []

    def add(self, region: slice | Tile, dy: Tensor, x: Tensor) -> None:
        """What comes from these rows, with only these features of x or dy if the region is a tile."""
        gemm, out, features = self._wgrad.gemm, self._total, _ALL
        if isinstance(region, Tile):
            features = region.features
            gemm, out = self._narrow(out, features)
        with record_gemm("wgrad"):
            gemm.wgrad(dy, x, rows=rows_of(region), out=out, add=_ALL in self._begun or features in self._begun)
        self._begun.append(features)

    def result(self) -> Tensor | None:
        """What autograd gets, once all parts were added."""
        wgrad, total = self._wgrad, self._total
        if total is wgrad.main_grad:
            return None
        return wgrad.deliver(total if wgrad.main_grad is not None else total.to(wgrad.dtype))
