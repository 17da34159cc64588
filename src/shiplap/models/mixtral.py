"""Mixtral (Jiang et al. 2024): LLaMA's block with experts in the place of the feed-forward layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from shiplap.layers.moe import Routing, balance
from shiplap.models.build import Build
from shiplap.models.llama3 import Llama3


class Mixtral(Llama3):
    """The whole model; this rank's shard of it."""

    def __init__(self, build: Build) -> None:
        """Put the parts together.

        Raises:
            UserError: the TP size does not divide heads, hidden or feed-forward size.
        """
        super().__init__(build)
        self.balance_coefficient = build.config.router_aux_loss_coefficient
        self.token_group = build.token_group
        self._tokens_per_expert: Tensor | None = None

    def make_mlp(self, build: Build) -> nn.Module:
        """Experts."""
        return build.experts()

    def auxiliary_loss(self, routings: Sequence[Routing], sequence_length: int) -> Tensor:
        """The load-balancing loss, weighted."""
        loss, counts = balance(routings, sequence_length=sequence_length, group=self.token_group)
        if self.training:
            self._tokens_per_expert = counts if self._tokens_per_expert is None else self._tokens_per_expert + counts
        return self.balance_coefficient * loss

    def take_tokens_per_expert(self) -> Tensor | None:
        """How many tokens each expert of each layer got since this was last asked, `[layers, E]`; of this replica."""
        counts, self._tokens_per_expert = self._tokens_per_expert, None
        return counts
