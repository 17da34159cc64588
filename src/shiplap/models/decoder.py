"""What all decoder-only models share: the pre-norm block, and the way from tokens to logits or a loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import size_of
from shiplap.layers.dropout import Dropout
from shiplap.layers.recompute import recompute
from shiplap.models.build import Build
from shiplap.models.head import OutputHead
from shiplap.tensor_parallel.embedding import VocabParallelEmbedding
from shiplap.tensor_parallel.linear import ColumnParallelLinear


class DecoderBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, both branches through dropout."""

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: nn.Module,
        recompute_all: bool,
    ) -> None:
        """Put the parts together; with `recompute_all` backward computes the whole block again."""
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout
        self.recompute_all = recompute_all

    def forward(self, x: Tensor) -> Tensor:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`)."""
        if self.recompute_all and torch.is_grad_enabled():
            return recompute(self._forward, x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


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
        self.head = OutputHead(projection, vocab_size=config.vocab_size, group=group)

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

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """A loss, or logits.

        Args:
            tokens_BS: token ids `[B, S]`, the same on all TP ranks; any S up to the model's longest.
            targets_BS: token ids `[B, S]` to predict; `IGNORE` (-100) where none counts.

        Returns:
            With targets the mean loss, a scalar; without, the logits `[B, S, V]`. Both the same on all TP ranks.
        """
        sequence_length = tokens_BS.shape[1]
        tokens_SB = F.pad(tokens_BS.t(), (0, 0, 0, -sequence_length % self.sequence_multiple))
        x = self.embedding(tokens_SB)
        if self.positions is not None:
            x = x + self.positions(sequence_length, tokens_SB.shape[0])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return self.head.logits(x, sequence_length) if targets_BS is None else self.head.loss(x, targets_BS)
