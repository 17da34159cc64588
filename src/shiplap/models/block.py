"""The pre-norm block that all decoder-only models are made of."""

import torch
from torch import Tensor, nn

from shiplap.layers.cache import KeyValueCache
from shiplap.layers.moe import MixtureOfExperts, Routing
from shiplap.layers.recompute import recompute


class DecoderBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, both branches through dropout.

    Attributes:
        recompute_all: backward computes the whole block again.
    """

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: nn.Module,
    ) -> None:
        """Put the parts together."""
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout
        self.recompute_all = False

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, Routing | None]:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`).

        Args:
            x: the tokens.
            cache: keys and values of the tokens before them, to which theirs are added.

        Returns:
            The tokens, and where they were routed if there are experts.
        """
        if self.recompute_all and torch.is_grad_enabled():
            return recompute(self._forward, x)
        return self._forward(x, cache)

    def _forward(self, x: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, Routing | None]:
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        y, routing = self.mlp(self.mlp_norm(x)), None
        if isinstance(self.mlp, MixtureOfExperts):
            y, routing = y
        return x + self.dropout(y), routing
