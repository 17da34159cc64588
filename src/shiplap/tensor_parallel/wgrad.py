"""The gradient of a parallel layer's weight: from everything at once, or from parts while the rest is on its way."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.overlap.primitives import Tile
from shiplap.tensor_parallel.gemm import OfColumns, Product, narrowed

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Wgrad:
    """Where a weight's gradient goes: into its `main_grad` if it has one, else back to autograd.

    Attributes:
        product: what the layer multiplies.
        shape: of the weight.
        dtype: of the weight.
        main_grad: its buffer, of its shape.
        complete: what completes a gradient that is not this rank's alone.
    """

    product: Product
    shape: torch.Size
    dtype: torch.dtype
    main_grad: Tensor | None
    complete: Callable[[Tensor], Tensor] | None

    def __call__(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """From the whole sequence at once: what autograd gets."""
        if self.main_grad is not None and self.complete is None:
            self.product.wgrad(dy, x, rows=_ALL, out=self.main_grad, add=True)
            return None
        dw = dy.new_empty(self.shape, dtype=self.dtype if self.main_grad is None else self.main_grad.dtype)
        self.product.wgrad(dy, x, rows=_ALL, out=dw)
        return self.deliver(dw)

    def deliver(self, dw: Tensor) -> Tensor | None:
        """What autograd gets, of a gradient that is not in `main_grad` yet."""
        dw = dw if self.complete is None else self.complete(dw)
        if self.main_grad is None:
            return dw
        self.main_grad.add_(dw)
        return None


class WgradInParts:
    """A gradient from parts of what is gathered: the gather is hidden behind the products that use them.

    Parts of rows add up, in float32 at least, and are rounded once. Parts of columns are rows or columns of the
    gradient: nothing is added that was not before.
    """

    def __init__(self, wgrad: Wgrad, of_columns: OfColumns, like: Tensor) -> None:
        """Of nothing yet.

        Args:
            wgrad: where the gradient goes.
            of_columns: what narrows the product to columns of what is gathered: `of_inputs` if that is x, `of_outputs`
                if it is dy.
            like: a tensor on the device.
        """
        self._wgrad, self._of_columns = wgrad, of_columns
        main_grad = wgrad.main_grad
        if main_grad is not None and wgrad.complete is None:
            self._total, self._begun = main_grad, [_ALL]
        else:
            dtype = torch.promote_types(wgrad.dtype, torch.float32) if main_grad is None else main_grad.dtype
            self._total, self._begun = like.new_empty(wgrad.shape, dtype=dtype), []

    def add(self, region: slice | Tile, dy: Tensor, x: Tensor) -> None:
        """What comes from these rows, with only these columns of x or dy if the region is a tile."""
        product, out, rows, _ = narrowed(region, self._wgrad.product, self._total, self._of_columns)
        columns = region.columns if isinstance(region, Tile) else _ALL
        product.wgrad(dy, x, rows=rows, out=out, add=_ALL in self._begun or columns in self._begun)
        self._begun.append(columns)

    def result(self) -> Tensor | None:
        """What autograd gets, once all parts were added."""
        wgrad, total = self._wgrad, self._total
        if total is wgrad.main_grad:
            return None
        return wgrad.deliver(total if wgrad.main_grad is not None else total.to(wgrad.dtype))
