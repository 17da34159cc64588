"""Adapters in a model: put them in, merge them and take them apart again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from shiplap.config import UserError
from shiplap.lora.targets import Target
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.low_rank import LowRankAdapter
from shiplap.tensor_parallel.parameters import draw_by_name
from shiplap.tensor_parallel.placement import TP, Split


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A set of adapters: what their factors are for, and how they count.

    Attributes:
        targets: what is adapted.
        rank: r.
        alpha: adapters count alpha / r.
        dropout: probability, of their input.
    """

    targets: tuple[Target, ...]
    rank: int
    alpha: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a rank that is larger than a layer.

        Raises:
            UserError: naming both.
        """
        for target in self.targets:
            smallest = min(target.num_inputs, *(len(part.rows) for part in target.parts))
            if self.rank > smallest:
                raise UserError(
                    f"--lora-rank {self.rank} is larger than {target.layer}, whose smaller side is {smallest}."
                )

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by."""
        return self.alpha / self.rank


def add_adapters(model: nn.Module, adapters: Adapters, *, seed: int | None) -> None:
    """Put adapters beside the targets' weights, and freeze everything else.

    A layer stays the object that it was, with its plan and flags.

    Args:
        model: this rank's shard of the model.
        adapters: which.
        seed: of the factors, which are drawn by their names; None leaves them for a loader to fill.
    """
    model.requires_grad_(False)
    for target in adapters.targets:
        layer = model.get_submodule(target.layer)
        assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        blocks = _blocks(layer.placements["weight"].splits[TP], target)
        adapter = LowRankAdapter(layer, blocks, rank=adapters.rank, scale=adapters.scale, dropout=adapters.dropout)
        if seed is not None:
            draw_by_name(adapter, seed=seed, group=layer.group, path=f"{target.layer}.adapter")
        layer.adapter = adapter.to(layer.weight.device, layer.weight.dtype)


def _blocks(split: Split, target: Target) -> list[list[int]]:
    """Of each part the blocks of the layer's weight that it consists of; nothing where the weight has no blocks."""
    ends = [sum(block.size for block in split.blocks[: i + 1]) for i in range(len(split.blocks))]
    return [
        [i for i, end in enumerate(ends) if part.rows.start < end <= part.rows.stop]
        for part in target.parts
        if split.blocks
    ]


def _adapted(model: nn.Module) -> Iterator[tuple[ColumnParallelLinear | RowParallelLinear, LowRankAdapter]]:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and isinstance(module.adapter, LowRankAdapter):
            yield module, module.adapter


def merge(model: nn.Module) -> None:
    """Add all adapters to the weights that they stand beside: the same outputs without their cost.

    The weights' old values are kept for `unmerge`.
    """
    for layer, adapter in _adapted(model):
        adapter.merge(layer.weight)


def unmerge(model: nn.Module) -> None:
    """Take all adapters out of the weights again, which get their old values back to the bit."""
    for layer, adapter in _adapted(model):
        adapter.unmerge(layer.weight)


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """The model with its adapters merged, while inside."""
    merge(model)
    try:
        yield
    finally:
        unmerge(model)


def remove_adapters(model: nn.Module) -> None:
    """Take the adapters out of the model: what is merged stays in the weights, what is not is lost."""
    for layer, _ in list(_adapted(model)):
        layer.adapter = None
