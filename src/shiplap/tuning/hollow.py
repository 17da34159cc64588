"""Layers that multiply nothing: what is left of them is their communication.

An adapter still multiplies its input by the smaller factor, since that makes a part of what is communicated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.tensor_parallel.gemm import Dims, Gemm
from shiplap.tensor_parallel.low_rank import LowRankAdapter


@dataclass(frozen=True, kw_only=True)
class Hollow:
    """A GEMM with the shapes of another one that multiplies nothing: what a layer does besides is communicate."""

    of: Gemm

    @property
    def kept_features(self) -> slice | None:
        """The other's."""
        return self.of.kept_features

    def to(self, dtype: torch.dtype) -> "Hollow":
        """Itself: no weight is used."""
        return self

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """The other's."""
        return self.of.output_dims(x_dims, weight)

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """The other's."""
        return self.of.input_dims(y_dims, weight)

    def of_inputs(self, weight: Tensor, features: slice) -> "tuple[Hollow, Tensor]":
        """Itself."""
        return self, weight

    def of_outputs(self, weight: Tensor, features: slice) -> "tuple[Hollow, Tensor]":
        """Itself."""
        return self, weight

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: object, out: Tensor, add: bool = False
    ) -> None:
        """Nothing."""

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: object, out: Tensor, add: bool = False) -> None:
        """Nothing."""

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: object, out: Tensor, add: bool = False) -> None:
        """Nothing."""


class HollowAdapter:
    """An adapter whose GEMM is hollow."""

    merged = False

    def __init__(self, adapter: LowRankAdapter) -> None:
        """In the place of this one."""
        self._adapter = adapter
        self.shared = adapter.shared

    def extend(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Gemm]:
        """As the adapter's, hollow."""
        x, up, gemm = self._adapter.extend(x, weight)
        return x, up, Hollow(of=gemm)
