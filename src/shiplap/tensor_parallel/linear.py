"""Column- and row-parallel linear layers (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022).

| layer | weight | bias | input → output | with sequence parallelism |
|---|---|---|---|---|
| `ColumnParallelLinear` | `[O/R, I]` | `[O/R]` | `[S, …, I]` → `[S, …, O/R]` | `[S/R, …, I]` → `[S, …, O/R]` |
| `RowParallelLinear` | `[O, I/R]` | `[O]` | `[S, …, I/R]` → `[S, …, O]` | `[S, …, I/R]` → `[S/R, …, O]` |
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import AnyGroup, Group, as_group, size_of
from shiplap.dist.environment import GlobalEnv
from shiplap.dist.mappings import copy_to_all
from shiplap.overlap.plan import ColumnPlan, RowPlan, column_plan, row_plan
from shiplap.tensor_parallel.function import ColumnPattern, RowPattern, parallel_linear
from shiplap.tensor_parallel.gemm import DENSE, Gemm
from shiplap.tensor_parallel.parameters import ByName, Init, PlacedModule, shared_split, sum_shared_rows
from shiplap.tensor_parallel.placement import TP, Placement, Split

normal_init: Init = partial(nn.init.normal_, std=0.02)


def resolve(config: ModelParallelConfig | None, given: AnyGroup) -> tuple[ModelParallelConfig, Group]:
    """The config and the TP group of a new layer: the one place where they are taken from `GlobalEnv`.

    Raises:
        RuntimeError: something is missing and `init_all_env` was not called.
        ValueError: the group's size is not the config's TP size.
    """
    if config is None:
        config = GlobalEnv.instance().config
    group = as_group(given)
    if group is None and config.tensor_parallel_size > 1:
        group = GlobalEnv.instance().group("tp")
    if size_of(group) != config.tensor_parallel_size:
        raise ValueError(
            f"The tensor-parallel group has {size_of(group)} ranks, but tensor_parallel_size is "
            f"{config.tensor_parallel_size}. Give the layer the group of its config, or initialise with that config."
        )
    return config, group


def _require_divisible(what: str, size: int, num_ranks: int) -> None:
    if size % num_ranks:
        raise ValueError(f"{what} {size} is not divisible by the tensor-parallel size {num_ranks}.")


class Adapter(Protocol):
    """What may stand beside a layer's frozen weight, such as low-rank factors.

    Attributes:
        merged: whether it is in the layer's weight at the moment.
        shared: how the weight that gradients are for is divided, where several ranks hold some of its rows.
    """

    merged: bool
    shared: Split | None

    def extend(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Gemm]:
        """The input, the weight that gradients are for and the GEMM that the layer uses instead."""


class ColumnParallelLinear(PlacedModule):
    """`y = x Wᵀ + b`, its output features divided over the TP ranks.

    Attributes:
        weight: `[O/R, I]`.
        bias: `[O/R]` or None.
        plan: what overlaps, and how. Resolved here from the config; may be replaced.
        adapter: beside the weight, or None; may be set.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: ModelParallelConfig | None = None,
        group: AnyGroup = None,
        disable_tp_comm_pipeline: bool = False,
        skip_bias_add: bool = False,
        weight: nn.Parameter | None = None,
        split: Split | None = None,
        init: Init | ByName = normal_init,
    ) -> None:
        """Make this rank's shard.

        Args:
            in_features: I, the full input size.
            out_features: O, the full output size.
            bias: whether there is a bias; it starts at 0.
            config: topology and switches; by default those of `init_all_env`.
            group: the TP ranks; by default those of `init_all_env`.
            disable_tp_comm_pipeline: no pipelines here, of the forward all-gather or of dgrad; bulk overlap stays.
            skip_bias_add: return `(y, bias)` and leave the addition to the caller, who may fuse it.
            weight: an existing shard `[O/R, I]` to share, such as a tied embedding's.
            split: how the weight is divided along dim 0, where it is not simply in R equal parts; a bias likewise.
            init: fills the full weight `[O, I]` in place and returns it.

        Raises:
            ValueError: O is not divisible by the TP size, or a shared weight of another shape.
        """
        super().__init__()
        config, self.group = resolve(config, group)
        self.plan: ColumnPlan = column_plan(config, disable_pipeline=disable_tp_comm_pipeline)
        self.disable_tp_comm_pipeline = disable_tp_comm_pipeline
        self.sequence_parallel = config.sequence_parallel
        self.adapter: Adapter | None = None
        self.skip_bias_add = skip_bias_add
        if split is None and weight is None:
            _require_divisible("out_features", out_features, size_of(self.group))
        splits = {TP: split or Split()}
        if weight is None:
            placement = Placement(full_shape=(out_features, in_features), splits=splits)
            weight = self.new_parameter("weight", placement, self.group, init)
        elif weight.shape[1] != in_features:
            raise ValueError(f"The shared weight takes {weight.shape[1]} input features, this layer {in_features}.")
        self.weight = weight
        self._shared = shared_split(self.placements.get("weight"), self.group)
        self.bias: nn.Parameter | None = None
        if bias:
            placement = Placement(full_shape=(out_features,), splits=splits)
            self.bias = self.new_parameter("bias", placement, self.group, nn.init.zeros_)

    def forward(self, x: Tensor, gemm: Gemm = DENSE) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[S/R, …, I]` (without sequence parallelism `[S, …, I]`) to `[S, …, O/R]`; and the bias, if asked for.

        Args:
            x: the input.
            gemm: what stands in the place of `x Wᵀ`; it may change the shapes.
        """
        weight: Tensor = self.weight
        shared = self._shared
        if self.adapter is not None and not self.adapter.merged:
            x, weight, gemm = self.adapter.extend(x, weight)
            shared = self.adapter.shared
        complete = None if shared is None else partial(sum_shared_rows, split=shared, group=self.group)
        pattern = ColumnPattern(plan=self.plan, group=self.group, gemm=gemm, complete=complete)
        if self.skip_bias_add:
            return parallel_linear(x, weight, None, pattern), self.bias
        return parallel_linear(x, weight, self.bias, pattern)


class RowParallelLinear(PlacedModule):
    """`y = x Wᵀ + b`, its input features divided over the TP ranks, whose partial products are summed.

    Attributes:
        weight: `[O, I/R]`.
        bias: `[O]`, equal on all ranks, or None.
        plan: what overlaps, and how. Resolved here from the config; may be replaced.
        adapter: beside the weight, or None; may be set.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: ModelParallelConfig | None = None,
        group: AnyGroup = None,
        skip_bias_add: bool = False,
        init: Init | ByName = normal_init,
    ) -> None:
        """Make this rank's shard; the arguments are those of `ColumnParallelLinear`.

        Raises:
            ValueError: I is not divisible by the TP size.
        """
        super().__init__()
        config, self.group = resolve(config, group)
        self.plan: RowPlan = row_plan(config)
        self.sequence_parallel = config.sequence_parallel
        self.adapter: Adapter | None = None
        self.skip_bias_add = skip_bias_add
        _require_divisible("in_features", in_features, size_of(self.group))
        placement = Placement(full_shape=(out_features, in_features), splits={TP: Split(dim=1)})
        self.weight = self.new_parameter("weight", placement, self.group, init)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor, gemm: Gemm = DENSE) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[S, …, I/R]` to `[S/R, …, O]` (without sequence parallelism `[S, …, O]`); and the bias, if asked for.

        Args:
            x: the input.
            gemm: what stands in the place of `x Wᵀ`; it may change the shapes.

        Raises:
            ValueError: under sequence parallelism, S is not divisible by the TP size.
        """
        if self.sequence_parallel:
            _require_divisible("The sequence length (dim 0)", x.shape[0], size_of(self.group))
        weight: Tensor = self.weight
        if self.adapter is not None and not self.adapter.merged:
            x, weight, gemm = self.adapter.extend(x, weight)
        pattern = RowPattern(plan=self.plan, group=self.group, gemm=gemm)
        if not self.skip_bias_add:
            return parallel_linear(x, weight, self.bias, pattern)
        y = parallel_linear(x, weight, None, pattern)
        if self.bias is None or not self.sequence_parallel:
            return y, self.bias
        # The caller adds it to this rank's tokens only, so its gradient must be summed over the ranks.
        return y, copy_to_all(self.bias, group=self.group)[0]
