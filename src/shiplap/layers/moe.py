"""Mixture of experts (Jiang et al. 2024): each token goes through its k best of E feed-forward layers.

The experts are divided like any feed-forward layer: every rank holds a part of each. So the two parallel layers stay
what they are, with all their overlap, and no token travels to another rank because of its expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group, rank_in
from shiplap.dist.mappings import copy_to_all, gather_from_shard, reduce_from_all
from shiplap.tensor_parallel.experts import Assignment, FromExperts, ToExperts
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.parameters import ByName, Init, PlacedModule
from shiplap.tensor_parallel.placement import Block, Placement, Split


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What a router decided about this rank's tokens.

    Attributes:
        probabilities: `[S/R, B, E]` (without sequence parallelism `[S, B, E]`), float32, with gradient.
        experts: the chosen ones, `[S/R, B, k]`.
    """

    probabilities: Tensor
    experts: Tensor


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly experts are used.

    Attributes:
        loss: a scalar, k if all are used alike, more if not; the mean over micro-batches.
        tokens_per_expert: `[layers, E]`, the sum over micro-batches.
        num_micro_batches: that they are of.
    """

    loss: Tensor
    tokens_per_expert: Tensor
    num_micro_batches: int = 1

    def detach(self) -> "Balance":
        """The same without gradient."""
        return replace(self, loss=self.loss.detach())

    def __add__(self, other: "Balance") -> "Balance":
        """Of both together."""
        count = self.num_micro_batches + other.num_micro_batches
        loss = (self.loss * self.num_micro_batches + other.loss * other.num_micro_batches) / count
        tokens_per_expert = self.tokens_per_expert + other.tokens_per_expert
        return Balance(loss=loss, tokens_per_expert=tokens_per_expert, num_micro_batches=count)


class Router(PlacedModule):
    """Scores every token against every expert. In float32, also under autocast (Fedus et al. 2021, section 2.4)."""

    def __init__(
        self, hidden_size: int, num_experts: int, *, experts_per_token: int, group: Group, init: Init | ByName
    ) -> None:
        """Weight `[E, H]`, whole on every rank.

        Args:
            hidden_size: H.
            num_experts: E.
            experts_per_token: k.
            group: the ranks that each see other tokens, over which the weight's gradient is summed; None where this
                rank sees them all.
            init: initial weight.
        """
        super().__init__()
        self.weight = self.new_parameter("weight", Placement(full_shape=(num_experts, hidden_size)), None, init)
        self.experts_per_token = experts_per_token
        self.group = group

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`[S/R, B, H]` to the weights `[S/R, B, k]` of each token's experts, which sum to 1, and what was decided."""
        (weight,) = copy_to_all(self.weight, group=self.group)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), weight.float()).softmax(-1)
        weights, experts = probabilities.topk(self.experts_per_token, dim=-1)
        return weights / weights.sum(-1, keepdim=True), Routing(probabilities=probabilities, experts=experts)


class MixtureOfExperts(nn.Module):
    """`Σ weight · fc2(silu(gate) · up)` over a token's experts, gate and up being one product FC1.

    The full FC1 weight is `[E 2F, H]`, for each expert gate above up; FC2's is `[E H, F]`. All are divided along F.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        num_experts: int,
        experts_per_token: int,
        parallel: ModelParallelConfig,
        group: Group,
        init: Init | ByName,
        output_init: Init | ByName,
    ) -> None:
        """Make this rank's part.

        Args:
            hidden_size: H.
            ffn_hidden_size: F of the full model; the TP size divides it, and F/R is a multiple of 8.
            num_experts: E.
            experts_per_token: k.
            parallel: topology and switches.
            group: the TP ranks.
            init: initial weight of router and FC1.
            output_init: initial weight of FC2.
        """
        super().__init__()
        self.group = group
        self.sequence_parallel = parallel.sequence_parallel
        self.router = Router(
            hidden_size,
            num_experts,
            experts_per_token=experts_per_token,
            group=group if parallel.sequence_parallel else None,
            init=init,
        )
        self.num_experts = num_experts
        num_rows = num_experts * 2 * ffn_hidden_size
        self.fc1 = ColumnParallelLinear(
            hidden_size,
            num_rows,
            False,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_fc1,
            split=Split(blocks=2 * num_experts * (Block(size=ffn_hidden_size),)),
            init=init,
        )
        self.fc2 = RowParallelLinear(
            ffn_hidden_size, num_experts * hidden_size, False, config=parallel, group=group, init=output_init
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`), and what the router decided."""
        weights, routing = self.router(x)
        weights_SBk, experts_SBk = self._everywhere(weights, routing.experts)
        assignment = Assignment(experts=experts_SBk, num_experts=self.num_experts)
        gate, up = self.fc1(x, ToExperts(assignment=assignment)).chunk(2, dim=-1)
        # Each weight times the input of FC2, which is linear, instead of its output: that is a sum already.
        y: Tensor = self.fc2(
            F.silu(gate) * up * weights_SBk[..., None].to(up.dtype), FromExperts(assignment=assignment)
        )
        return y, routing

    def _everywhere(self, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts `[S, B, k]` of all tokens; each rank's gradient of the weights is a part of the whole."""
        if not self.sequence_parallel:
            return copy_to_all(weights, group=self.group)[0], experts
        # One message: float32 holds the number of an expert exactly.
        both = gather_from_shard(torch.cat([weights, experts.to(weights.dtype)], dim=-1), self.group)
        weights_SBk, experts_SBk = both.chunk(2, dim=-1)
        return weights_SBk, experts_SBk.long()


def balance(
    routings: Sequence[Routing], *, sequence_length: int, group: Group, num_layers: int | None = None
) -> Balance:
    """How evenly the experts of all layers are used.

    A layer's loss is `E Σ f P` over its experts: f, how often one is among a token's chosen, and P, its mean
    probability, both over all tokens (Fedus et al. 2021, equation 4); the loss is their mean over the layers. Taking f
    and P over all layers at once, as transformers' Mixtral does, is even while single layers use one expert for
    everything: layers that err in opposite ways cancel.

    Args:
        routings: of this rank's tokens, one for each layer.
        sequence_length: number of tokens without padding, which does not count.
        group: the ranks that each have other tokens; None where this rank has them all.
        num_layers: of the whole model, over which the loss is a mean; by default as many as there are routings.

    Returns:
        The same on all ranks, its loss with gradient.
    """
    probabilities, experts = routings[0].probabilities, routings[0].experts
    num_rows, batch, num_experts = probabilities.shape
    positions = rank_in(group) * num_rows + torch.arange(num_rows, device=probabilities.device)
    counted = (positions < sequence_length)[:, None, None]
    every_expert = torch.arange(num_experts, device=experts.device)
    sums = []
    for routing in routings:
        chosen = (routing.experts[..., None] == every_expert).any(2)
        sums.append(torch.stack([(p * counted).sum((0, 1)) for p in (routing.probabilities, chosen.float())]))
    probability_sums, counts = reduce_from_all(torch.stack(sums), group).unbind(1)
    num_tokens = sequence_length * batch
    of_each_layer = num_experts * (probability_sums / num_tokens * (counts / num_tokens)).sum(-1)
    return Balance(loss=of_each_layer.sum() / (num_layers or len(routings)), tokens_per_expert=counts.detach())
