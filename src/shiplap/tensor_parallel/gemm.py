"""What a parallel linear layer multiplies: the arithmetic of any rows of the sequence, without communication.

A pattern (`shiplap.tensor_parallel.function`) decides which rows come when, and calls its product for them. So whatever
is a product runs under every overlap method. `Dense` is the ordinary one, `y = x Wᵀ (+ b)`; experts and low-rank
adapters bring their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from shiplap.overlap.primitives import Rows, Tile
from shiplap.tensor_parallel import functional

Dims = tuple[int, ...]
OfColumns = Callable[[Tensor, slice], tuple["Product", Tensor]]
"""`of_inputs` or `of_outputs` of a product."""


class Product(Protocol):
    """`y = x Wᵀ (+ b)`, or what stands in its place.

    `rows` says which rows of the sequence `x` or `dy` holds: products that treat tokens differently need it. Rows of
    several shards have one more dim in front, the shards; `out` is contiguous all the same.

    Attributes:
        kept_columns: None: for wgrad the input is kept as it came, a Column layer's as its sequence shard. Else only
            these of its columns are, of the whole sequence, and nothing is gathered in backward.
    """

    @property
    def kept_columns(self) -> slice | None:
        """See above."""

    def to(self, dtype: torch.dtype) -> Self:
        """The product with the weights that it holds itself in this dtype."""

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """The output's dims after the first, from the input's."""

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """The input's dims after the first, from the output's."""

    def of_inputs(self, weight: Tensor, columns: slice) -> tuple[Self, Tensor]:
        """The product of these columns of the input, and its weight: a view, so that a gradient can be narrowed too."""

    def of_outputs(self, weight: Tensor, columns: slice) -> tuple[Self, Tensor]:
        """The product that makes these columns of the output, and its weight, a view as well."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """Write the output of these rows, in the dtype of `out`; or add it, without a bias, to what is there."""

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the input's gradient of these rows, in the dtype of `out`; or add it to what is there."""

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """Write the weight's gradient that comes from these rows, in the dtype of `out`; or add it to what is there."""


@dataclass(frozen=True)
class Dense:
    """`y = x Wᵀ (+ b)`: the same for all tokens."""

    kept_columns: slice | None = None

    def to(self, dtype: torch.dtype) -> "Dense":
        """Itself: it holds no weight."""
        return self

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """`[…, I]` to `[…, O]`."""
        return *x_dims[:-1], weight.shape[0]

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """`[…, O]` to `[…, I]`."""
        return *y_dims[:-1], weight.shape[1]

    def of_inputs(self, weight: Tensor, columns: slice) -> "tuple[Dense, Tensor]":
        """Columns of W."""
        return self, weight[:, columns]

    def of_outputs(self, weight: Tensor, columns: slice) -> "tuple[Dense, Tensor]":
        """Rows of W."""
        return self, weight[columns]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """`x Wᵀ (+ b)`."""
        functional.forward(x, weight, bias, out=out, add=add)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dy W`."""
        functional.dgrad(dy, weight, out=out, add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dyᵀ x`."""
        functional.wgrad(dy, x, out=out, add=add)


DENSE = Dense()


_OfRows = TypeVar("_OfRows", bound=Rows)


def narrowed(
    region: _OfRows | Tile,
    product: Product,
    weight: Tensor,
    of_columns: OfColumns,
) -> tuple[Product, Tensor, _OfRows | slice, bool]:
    """What multiplies there: product, weight and rows; and whether it adds to what the tiles before it made."""
    if isinstance(region, Tile):
        return *of_columns(weight, region.columns), region.rows, not region.is_first
    return product, weight, region, False
