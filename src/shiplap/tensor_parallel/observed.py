"""A product that says when it runs, to whoever watches (`shiplap.dist.hooks`)."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from shiplap.dist.hooks import running_product
from shiplap.overlap.primitives import Rows
from shiplap.tensor_parallel.gemm import Dims, Product


@dataclass(frozen=True, kw_only=True)
class ObservedProduct:
    """Computes what another product computes.

    Attributes:
        of: that one.
    """

    of: Product

    @property
    def kept_columns(self) -> slice | None:
        """The other's."""
        return self.of.kept_columns

    def to(self, dtype: torch.dtype) -> Self:
        """The other in this dtype."""
        return replace(self, of=self.of.to(dtype))

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """The other's."""
        return self.of.output_dims(x_dims, weight)

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """The other's."""
        return self.of.input_dims(y_dims, weight)

    def of_inputs(self, weight: Tensor, columns: slice) -> tuple[Self, Tensor]:
        """The other's."""
        product, some = self.of.of_inputs(weight, columns)
        return replace(self, of=product), some

    def of_outputs(self, weight: Tensor, columns: slice) -> tuple[Self, Tensor]:
        """The other's."""
        product, some = self.of.of_outputs(weight, columns)
        return replace(self, of=product), some

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """Write the output of these rows, or add it."""
        with running_product("forward"):
            self.of.forward(x, weight, bias, rows=rows, out=out, add=add)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the input's gradient of these rows, or add it."""
        with running_product("dgrad"):
            self.of.dgrad(dy, weight, rows=rows, out=out, add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the weight's gradient that comes from these rows, or add it."""
        with running_product("wgrad"):
            self.of.wgrad(dy, x, rows=rows, out=out, add=add)
