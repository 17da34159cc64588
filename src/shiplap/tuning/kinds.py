"""Layers that are as fast as one another: of each kind only one is measured."""

from collections.abc import Iterable
from dataclasses import dataclass

from shiplap.inspection.layers import ParallelLayer
from shiplap.tuning.candidates import Pass
from shiplap.tuning.measured import Description, describe


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What they have in common.

    Attributes:
        description: of each.
        layer: the first of them.
        paths: of all.
    """

    description: Description
    layer: ParallelLayer
    paths: list[str]

    @property
    def directions(self) -> tuple[Pass, ...]:
        """The passes in which they communicate."""
        return ("forward", "backward") if self.layer.has_backward else ("forward",)


def kinds_of(layers: Iterable[ParallelLayer]) -> list[LayerKind]:
    """The kinds of layers, in their order."""
    kinds: list[LayerKind] = []
    for layer in layers:
        description = describe(layer)
        known = next((kind for kind in kinds if kind.description == description), None)
        if known is None:
            kinds.append(LayerKind(description=description, layer=layer, paths=[layer.path]))
        else:
            known.paths.append(layer.path)
    return kinds
