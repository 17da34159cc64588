"""What one rank got for a case, what it should have got, and what both kinds of problem need to get there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group, rank_in, size_of
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.placement import along_tp
from shiplap.tools.verify.cases import Case

Tensors = dict[str, Tensor]
Layer = TypeVar("Layer", ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """This rank's part, by name: `y`, `dx`, `dW`, `db`, and so on.

    Attributes:
        got: what the layers gave; what they should have given and did not is missing.
        expected: the same in float64, on the CPU.
        mistakes: whatever else is wrong, as text.
        replicated: the names of what every TP rank must have alike, to the bit.
    """

    got: Tensors
    expected: Tensors
    mistakes: list[str]
    replicated: set[str]


def draw(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Random numbers in float64, the same on all ranks, which the dtype holds without rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).double()


def tokens(case: Case, x: Tensor, group: Group) -> Tensor:
    """This rank's rows of a tensor that sequence parallelism shards along dim 0."""
    return x.chunk(size_of(group))[rank_in(group)] if case.plans.sequence_parallel else x


def features(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of the last dim."""
    return x.chunk(size_of(group), dim=-1)[rank_in(group)]


def place(case: Case, x: Tensor) -> Tensor:
    """A float64 tensor as the layers take it: on the device, in the parameters' dtype."""
    return x.to(case.device, case.parameter_dtype)


def new_column(case: Case, weight: Tensor, bias: Tensor | None, group: Group) -> ColumnParallelLinear:
    """A column layer with the case's plan and this rank's shards of these parameters."""
    outputs, inputs = weight.shape
    config = _config(case, group)
    layer = ColumnParallelLinear(
        inputs, outputs, bias is not None, config=config, group=group, init=lambda full: full.copy_(weight)
    )
    layer.plan = case.plans.column
    return _with_bias(case, layer, bias)


def new_row(case: Case, weight: Tensor, bias: Tensor | None, group: Group) -> RowParallelLinear:
    """A row layer, likewise."""
    outputs, inputs = weight.shape
    config = _config(case, group)
    layer = RowParallelLinear(
        inputs, outputs, bias is not None, config=config, group=group, init=lambda full: full.copy_(weight)
    )
    layer.plan = case.plans.row
    return _with_bias(case, layer, bias)


def _config(case: Case, group: Group) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_parallel_size=size_of(group), sequence_parallel=case.plans.sequence_parallel)


def _with_bias(case: Case, layer: Layer, bias: Tensor | None) -> Layer:
    """The layer with its part of the bias, on the device and in the dtype."""
    if layer.bias is not None and bias is not None:
        placement = layer.placements.get("bias")
        with torch.no_grad():
            layer.bias.copy_(bias if placement is None else placement.take(bias, along_tp(layer.group)))
    return layer.to(case.device, case.parameter_dtype)


def give_main_grad(weight: Tensor) -> Tensor:
    """A float32 buffer for the weight's gradient, in which there is a 1 already everywhere."""
    main_grad = torch.ones(weight.shape, dtype=torch.float32, device=weight.device)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    return main_grad


def call(case: Case, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, recomputed in backward if the case's mode says so."""
    if case.mode not in ("reentrant", "non_reentrant"):
        return function(x)
    y: Tensor = checkpoint(function, x, use_reentrant=case.mode == "reentrant")
    return y


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Autocast, `no_grad` or a CUDA stream of its own, as the case's mode says."""
    match case.mode:
        case "autocast":
            with torch.autocast(case.device, case.dtype):
                yield
        case "no_grad":
            with torch.no_grad():
                yield
        case "stream":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()
        case _:
            yield
