"""What all decoder-only models share: the way from tokens to logits or a loss."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import size_of
from shiplap.layers.cache import KeyValueCache
from shiplap.layers.dropout import Dropout
from shiplap.layers.moe import Balance, Routing
from shiplap.models.block import DecoderBlock
from shiplap.models.build import Build
from shiplap.models.head import OutputHead
from shiplap.tensor_parallel.embedding import VocabParallelEmbedding
from shiplap.tensor_parallel.linear import ColumnParallelLinear


class DecoderModel(nn.Module):
    """A decoder-only model; this rank's shard of it. Families say what their parts are.

    Initial weights are drawn from the default generator: the same whatever the TP size, if it is seeded alike.
    """

    def __init__(self, build: Build) -> None:
        """Put the parts together.

        Raises:
            UserError: the TP size does not divide heads, hidden or feed-forward size.
        """
        super().__init__()
        config, parallel, group = build.config, build.parallel, build.group
        config.check_divisible_by(parallel.tensor_parallel_size)
        self.sequence_multiple = size_of(build.token_group)
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, config=parallel, group=group, init=build.init
        )
        self.positions = self.make_positions(build)
        self.dropout = Dropout(config.dropout, group=build.token_group)
        self.blocks = nn.ModuleList(
            DecoderBlock(
                attention_norm=self.make_norm(build),
                attention=self.make_attention(build),
                mlp_norm=self.make_norm(build),
                mlp=self.make_mlp(build),
                dropout=Dropout(config.dropout, group=build.token_group),
                recompute_all=build.recompute == "full",
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = self.make_norm(build)
        projection = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            False,
            config=parallel,
            group=group,
            weight=self.embedding.weight if config.tie_embeddings else None,
            shard=self.embedding.shards["weight"],
            init=build.init,
        )
        self.head = OutputHead(projection, vocab_size=config.vocab_size, group=group, token_group=build.token_group)

    def make_positions(self, build: Build) -> nn.Module | None:
        """What adds positions to the embedding; None where attention knows them."""
        return None

    def make_norm(self, build: Build) -> nn.Module:
        """A norm of the residual stream."""
        raise NotImplementedError

    def make_attention(self, build: Build) -> nn.Module:
        """A block's attention."""
        raise NotImplementedError

    def make_mlp(self, build: Build) -> nn.Module:
        """A block's feed-forward layer."""
        raise NotImplementedError

    def auxiliary_loss(self, routings: Sequence[Routing], sequence_length: int) -> Tensor:
        """What training adds to the cross-entropy, a scalar; only families with experts have something to add."""
        raise NotImplementedError

    def take_balance(self) -> Balance | None:
        """How evenly experts were used in training since this was last asked; None without experts."""
        return None

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """A loss, or logits.

        Args:
            tokens_BS: token ids `[B, S]`, the same on all TP ranks; any S up to the model's longest.
            targets_BS: token ids `[B, S]` to predict; `IGNORE` (-100) where none counts.
            cache: what is known of the tokens before these, to which these are added; for writing, without gradients.
            last_only: compute the last token's logits only, which is all that writing needs; without gradients too.

        Returns:
            With targets the mean loss, a scalar, in training with what the family adds to it; without, the logits
            `[B, S, V]`, or `[B, 1, V]` of the last token. All the same on all TP ranks.
        """
        sequence_length = tokens_BS.shape[1]
        tokens_SB = F.pad(tokens_BS.t(), (0, 0, 0, -sequence_length % self.sequence_multiple))
        start = 0
        if cache is not None:
            start = cache.length
            cache.begin(sequence_length)
        x = self.embedding(tokens_SB)
        if self.positions is not None:
            x = x + self.positions(sequence_length, tokens_SB.shape[0], start=start)
        x = self.dropout(x)
        routings: list[Routing] = []
        for block in self.blocks:
            x, routing = block(x, cache)
            routings += [routing] if routing is not None else []
        if cache is not None:
            cache.end()
        x = self.final_norm(x)
        if targets_BS is None:
            logits_of = self.head.last_logits if last_only else self.head.logits
            return logits_of(x, sequence_length)
        loss = self.head.loss(x, targets_BS)
        return loss + self.auxiliary_loss(routings, sequence_length) if routings and self.training else loss
