"""Mixtral (Jiang et al. 2024): LLaMA's block with experts in the place of the feed-forward layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from shiplap.layers.moe import Balance, Routing, balance
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
        self.num_layers = build.config.num_layers
        self.token_group = build.token_group
        self._balance: Balance | None = None

    def make_mlp(self, build: Build) -> nn.Module:
        """Experts."""
        return build.experts()

    def auxiliary_loss(self, routings: Sequence[Routing], sequence_length: int) -> Tensor:
        """The load-balancing loss of these layers, weighted."""
        here = balance(routings, sequence_length=sequence_length, group=self.token_group, num_layers=self.num_layers)
        self._balance = here.detach() if self._balance is None else self._balance + here.detach()
        return self.balance_coefficient * here.loss

    def take_balance(self) -> Balance | None:
        """How evenly experts were used in training since this was last asked; of this replica."""
        taken, self._balance = self._balance, None
        return taken
