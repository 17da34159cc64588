"""A model's parallel linear layers: which of their gradients are computed, and what else decides what they do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shiplap.layers.moe import MixtureOfExperts
from shiplap.models.block import DecoderBlock
from shiplap.models.decoder import DecoderModel
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.low_rank import LowRankAdapter

Kind = Literal["column", "row"]


@dataclass(frozen=True, kw_only=True)
class ParallelLayer:
    """A layer, and which of its gradients are computed.

    Attributes:
        path: of the module.
        module: the layer itself.
        has_dgrad: its input needs a gradient.
        has_wgrad: its weight does, or the adapter that stands beside it.
        has_bias_grad: its bias does.
        adapter: unmerged, or None.
        experts: the experts that its weight consists of, or None.
        is_recomputed: backward runs its forward again.
        width: values of a token in its messages.
    """

    path: str
    module: ColumnParallelLinear | RowParallelLinear
    has_dgrad: bool
    has_wgrad: bool
    has_bias_grad: bool
    adapter: LowRankAdapter | None
    experts: MixtureOfExperts | None
    is_recomputed: bool
    width: int

    @property
    def kind(self) -> Kind:
        """Which of the two."""
        return "column" if isinstance(self.module, ColumnParallelLinear) else "row"

    def has_product(self, product: str | None) -> bool:
        """Whether there is such a product: `forward`, `dgrad` or `wgrad`."""
        return {"forward": True, "dgrad": self.has_dgrad, "wgrad": self.has_wgrad, None: False}[product]

    @property
    def gathers_again(self) -> bool:
        """Whether a Column layer that keeps its shard of the input gathers it again for wgrad."""
        return self.kind == "column" and self.has_wgrad and self.adapter is None

    @property
    def has_backward(self) -> bool:
        """Whether backward communicates."""
        if self.kind == "row":
            return self.has_dgrad or self.has_wgrad or self.has_bias_grad
        return self.has_dgrad or self.gathers_again


def parallel_layers(model: DecoderModel) -> Iterator[ParallelLayer]:
    """All parallel layers. Modules are registered in the order in which they run, but for some norms and the router.

    These stand before a Column layer of their module and act after it, or beside it. So a Column layer's input is what
    came into its module, and a Row layer's what all before it made.
    """
    any_before = False
    before: dict[str, bool] = {}
    block: DecoderBlock | None = None
    is_block_trained = False
    experts: MixtureOfExperts | None = None
    for path, module in model.named_modules():
        before[path] = any_before
        if isinstance(module, DecoderBlock):
            block, experts = module, None
            is_block_trained = any_before or any(p.requires_grad for p in module.parameters())
        elif not path.startswith("blocks."):
            block = experts = None
        if isinstance(module, MixtureOfExperts):
            experts = module
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            is_column = isinstance(module, ColumnParallelLinear)
            adapter = module.adapter
            adapter = adapter if isinstance(adapter, LowRankAdapter) and not adapter.merged else None
            # All take rows of the residual stream or make them, experts' too; h of an adapter travels with x.
            width = model.config.hidden_size
            if is_column and adapter is not None:
                width += adapter.down.shape[0]
            into = before[path.rpartition(".")[0]] if is_column else any_before
            yield ParallelLayer(
                path=path,
                module=module,
                has_dgrad=into or (adapter is not None and adapter.down.requires_grad),
                has_wgrad=(module.weight if adapter is None else adapter.up).requires_grad,
                has_bias_grad=module.bias is not None and module.bias.requires_grad,
                adapter=adapter,
                experts=experts,
                is_recomputed=block is not None and block.recompute_all and is_block_trained,
                width=width,
            )
        any_before = any_before or any(p.requires_grad for p in module.parameters(recurse=False))
