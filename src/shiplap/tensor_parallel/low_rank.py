"""Low-rank adapters of the parallel linear layers (Hu et al. 2021), without communication of their own.

`y = x Wᵀ + s (x Aᵀ) Bᵀ` is the same layer with r more input features: `[x | h] [W | B]ᵀ` with `h = s x Aᵀ`. So the
adapted layer gathers, or scatters, exactly as often as before, and every overlap method works as it is.

| | `down` A | `up` B | h |
|---|---|---|---|
| Column | `[P r, I]`, whole on every rank | `[O'/R, r]`, divided like W's rows | `[S/R, …, P r]`, travels with x |
| Row | `[r, I/R]`, divided like W's columns | `[O, r]`, whole on every rank | `[S, …, r]`, a partial sum as y is |

A fused layer consists of parts, such as queries, keys and values. Each of the P adapted ones has factors of its own,
one below the other; O' are their output features.

W is frozen. For wgrad of B only h is kept, a Column layer's of the whole sequence: nothing is gathered again in
backward. The gradient of A comes from autograd; that of the factors that every rank holds is summed over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import Group
from shiplap.dist.mappings import copy_to_all
from shiplap.overlap.primitives import Rows
from shiplap.tensor_parallel.gemm import Dims, cast_for_autocast, linear_dgrad, linear_forward, linear_wgrad
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.parameters import ByName, PlacedModule, shared_split
from shiplap.tensor_parallel.placement import TP, Placement, Split, along_tp
from shiplap.tensor_parallel.random import different_per_rank


@dataclass(frozen=True, kw_only=True)
class _Part:
    """An adapted part of a layer, on this rank.

    Attributes:
        outputs: its features of y.
        up: its rows of `up`.
        down: its rows of `down`, and its features of h.
        factors: the columns of `up` that belong to these features of h.
    """

    outputs: slice
    up: slice
    down: slice
    factors: slice

    def of_features(self, features: slice) -> "_Part | None":
        """The part of only these features of h, counted from the first of them; None if there are none."""
        start, stop = max(self.down.start, features.start), min(self.down.stop, features.stop)
        if start >= stop:
            return None
        return replace(
            self,
            down=slice(start - features.start, stop - features.start),
            factors=slice(start - self.down.start, stop - self.down.start),
        )


@dataclass(frozen=True, kw_only=True)
class LowRankGemm:
    """`[x | h] [W | B]ᵀ`, the weight that gradients are for being B.

    Attributes:
        base: W, this rank's.
        parts: where B has rows.
        num_features: of h.
    """

    base: Tensor
    parts: Sequence[_Part]
    num_features: int

    @property
    def kept_features(self) -> slice:
        """H."""
        return slice(self.base.shape[1], None)

    def to(self, dtype: torch.dtype) -> Self:
        """With W in this dtype."""
        return replace(self, base=self.base.to(dtype))

    def output_dims(self, x_dims: Dims, weight: Tensor) -> Dims:
        """`[…, I + P r]` to `[…, O]`."""
        return *x_dims[:-1], self.base.shape[0]

    def input_dims(self, y_dims: Dims, weight: Tensor) -> Dims:
        """`[…, O]` to `[…, I + P r]`."""
        return *y_dims[:-1], self.base.shape[1] + self.num_features

    def of_inputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """Columns of W, and those of B that belong to the features of h."""
        base = self.base[:, features]
        of_h = slice(max(features.start - self.base.shape[1], 0), max(features.stop - self.base.shape[1], 0))
        parts = [found for part in self.parts if (found := part.of_features(of_h)) is not None]
        return replace(self, base=base, parts=parts, num_features=of_h.stop - of_h.start), weight

    def of_outputs(self, weight: Tensor, features: slice) -> tuple[Self, Tensor]:
        """Rows of W and of B. For Row layers, which have no parts."""
        assert len(self.parts) == 1
        return replace(self, base=self.base[features]), weight[features]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows, out: Tensor, add: bool = False
    ) -> None:
        """`x Wᵀ (+ b)`, and `h Bᵀ` added where there are adapted parts."""
        linear_forward(x[..., : self.base.shape[1]], self.base, bias, out=out, add=add)
        h = x[..., self.kept_features]
        for part in self.parts:
            linear_forward(h[..., part.down], weight[part.up, part.factors], None, out=out[..., part.outputs], add=True)

    def dgrad(self, dy: Tensor, weight: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`[dy W | dy B]`."""
        linear_dgrad(dy, self.base, out=out[..., : self.base.shape[1]], add=add)
        dh = out[..., self.kept_features]
        for part in self.parts:
            up = weight[part.up, part.factors]
            linear_dgrad(dy[..., part.outputs], up, out=dh[..., part.down], add=add)

    def wgrad(self, dy: Tensor, x: Tensor, *, rows: Rows, out: Tensor, add: bool = False) -> None:
        """`dyᵀ h` of the adapted parts, one below the other."""
        for p in self.parts:
            linear_wgrad(dy[..., p.outputs], x[..., p.down], out=out[p.up], add=add)


class LowRankAdapter(PlacedModule):
    """The two factors beside the frozen weight of one layer; set as that layer's `adapter`.

    Attributes:
        down: A, drawn as PEFT does (Kaiming's uniform distribution).
        up: B, 0 at first.
        scale: s.
        merged: whether the factors' product is in the layer's weight at the moment.
        shared: how `up` is divided, where several ranks hold some of its rows.
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        parts: Sequence[Sequence[int]] = (),
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
    ) -> None:
        """Make this rank's part of the factors, which are drawn by name. The layer's own parameters stay as they are.

        Args:
            layer: the layer, whose weight is its own (no tied one).
            parts: the adapted parts, in order, each the blocks of the layer's weight that it consists of; by default
                one part, the whole layer.
            rank: r.
            scale: s.
            dropout: probability, of the input of A.
        """
        super().__init__()
        self.scale, self.dropout, self.merged = scale, dropout, False
        self.is_column = isinstance(layer, ColumnParallelLinear)
        self.group = layer.group
        self.sequence_parallel = layer.sequence_parallel
        weight = layer.placements["weight"]
        split = weight.splits[TP]
        num_outputs, num_inputs = weight.full_shape
        blocks = tuple(split.blocks[i] for part in parts for i in part)
        num_rows = sum(block.size for block in blocks) if blocks else num_outputs
        of_down: dict[str, Split] = {} if self.is_column else {TP: split}
        of_up: dict[str, Split] = {TP: Split(blocks=blocks)} if self.is_column else {}
        down = Placement(full_shape=((len(parts) or 1) * rank, num_inputs), splits=of_down)
        up = Placement(full_shape=(num_rows, rank), splits=of_up)
        self.down = self.new_parameter("down", down, self.group, ByName(_kaiming))
        self.up = self.new_parameter("up", up, self.group, ByName(nn.init.zeros_))
        self.shared = shared_split(up, self.group)
        self.parts = (
            _parts(split, parts, rank=rank, group=self.group)
            if parts
            else (_Part(outputs=slice(None), up=slice(None), down=slice(0, rank), factors=slice(None)),)
        )
        self._unmerged: Tensor | None = None

    def extend(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, LowRankGemm]:
        """What the layer multiplies instead of `x Wᵀ`.

        Args:
            x: the layer's input.
            weight: W.

        Returns:
            `[x | h]`, B, and their GEMM.
        """
        x = cast_for_autocast(x)
        token_group = self.group if self.sequence_parallel else None
        down: Tensor = self.down
        up: Tensor = self.up
        if self.is_column:
            (down,) = copy_to_all(down, group=token_group)
        else:
            (up,) = copy_to_all(up, group=self.group)
        h = F.linear(self._drop(x), down) * self.scale
        gemm = LowRankGemm(base=weight.detach(), parts=self.parts, num_features=h.shape[-1])
        return torch.cat([x, h.to(x.dtype)], dim=-1), up, gemm

    def _drop(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        # A Column layer's ranks see other tokens under sequence parallelism and else the same; a Row layer's other
        # features always.
        alike = self.is_column and not self.sequence_parallel
        with different_per_rank(None if alike else self.group, x.device):
            return F.dropout(x, self.dropout)

    @torch.no_grad()
    def merge(self, weight: Tensor) -> None:
        """Add `s B A` to W in place, and keep W's old value for `unmerge`. Communicates nothing."""
        assert not self.merged
        self._unmerged = weight.clone()
        for part in self.parts:
            weight[part.outputs] += (self.scale * (self.up[part.up] @ self.down[part.down])).to(weight.dtype)
        self.merged = True

    @torch.no_grad()
    def unmerge(self, weight: Tensor) -> None:
        """Put W's old value back, to the bit."""
        assert self._unmerged is not None
        weight.copy_(self._unmerged)
        self.merged, self._unmerged = False, None


def _kaiming(x: Tensor) -> Tensor:
    return nn.init.kaiming_uniform_(x, a=sqrt(5))


def _parts(split: Split, parts: Sequence[Sequence[int]], *, rank: int, group: Group) -> tuple[_Part, ...]:
    """Where each part's rows are on this rank."""
    place = along_tp(group)[TP]
    sizes = [len(block.range_of(place)) for block in split.blocks]
    found, up_start = [], 0
    for number, blocks in enumerate(parts):
        start, size = sum(sizes[: blocks[0]]), sum(sizes[i] for i in blocks)
        found.append(
            _Part(
                outputs=slice(start, start + size),
                up=slice(up_start, up_start + size),
                down=slice(number * rank, (number + 1) * rank),
                factors=slice(None),
            )
        )
        up_start += size
    return tuple(found)
