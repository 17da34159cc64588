"""GPT-2 (Radford et al. 2019): learned positions, biases, GELU, tied embeddings."""

from functools import partial
from math import sqrt

from torch import Tensor, nn

from shiplap.comm.collectives import Group
from shiplap.config.model import TransformerConfig
from shiplap.config.model_parallel import ModelParallelConfig
from shiplap.layers.attention import SelfAttention
from shiplap.layers.dropout import Dropout
from shiplap.layers.mlp import GeluMLP
from shiplap.layers.norm import LayerNorm
from shiplap.layers.position import LearnedPositions
from shiplap.models.decoder import DecoderBlock, OutputHead, pad_sequence, sequence_multiple
from shiplap.tensor_parallel.embedding import VocabParallelEmbedding
from shiplap.tensor_parallel.linear import ColumnParallelLinear


class GPT2(nn.Module):
    """The whole model; this rank's shard of it."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        parallel: ModelParallelConfig,
        group: Group,
        recompute: str = "none",
    ) -> None:
        """Draw the initial weights, the same whatever the TP size if the default generator is seeded alike.

        Args:
            config: sizes of the full model.
            parallel: topology and switches.
            group: the TP ranks.
            recompute: `none`, `selective` (the attention core) or `full` (whole blocks).

        Raises:
            UserError: the TP size does not divide heads, hidden or feed-forward size.
        """
        super().__init__()
        config.check_divisible_by(parallel.tensor_parallel_size)
        hidden, sequence_parallel = config.hidden_size, parallel.sequence_parallel
        init = partial(nn.init.normal_, std=config.initializer_range)
        # Projections into the residual stream start smaller, by the number of them (Radford et al. 2019, section 2.3).
        output_init = partial(nn.init.normal_, std=config.initializer_range / sqrt(2 * config.num_layers))
        norm = partial(
            LayerNorm, hidden, eps=config.layer_norm_epsilon, sequence_parallel=sequence_parallel, group=group
        )
        dropout = partial(Dropout, config.dropout, sequence_parallel=sequence_parallel, group=group)
        attention = partial(
            SelfAttention,
            hidden,
            config.num_attention_heads,
            parallel=parallel,
            group=group,
            dropout=config.dropout,
            init=init,
            output_init=output_init,
            recompute_core=recompute == "selective",
        )
        mlp = partial(
            GeluMLP,
            hidden,
            config.ffn_hidden_size,
            parallel=parallel,
            group=group,
            init=init,
            output_init=output_init,
        )

        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, config=parallel, group=group, init=init)
        self.positions = LearnedPositions(
            config.max_sequence_length, hidden, sequence_parallel=sequence_parallel, group=group, init=init
        )
        self.dropout = dropout()
        self.blocks = nn.ModuleList(
            DecoderBlock(
                attention_norm=norm(),
                attention=attention(),
                mlp_norm=norm(),
                mlp=mlp(),
                dropout=dropout(),
                recompute_all=recompute == "full",
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = norm()
        projection = ColumnParallelLinear(
            hidden, config.vocab_size, bias=False, config=parallel, group=group, weight=self.embedding.weight
        )
        self.head = OutputHead(projection, vocab_size=config.vocab_size, group=group)
        self.sequence_multiple = sequence_multiple(parallel.sequence_parallel, group)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """A loss, or logits.

        Args:
            tokens_BS: token ids `[B, S]`, the same on all TP ranks; any S up to the number of positions.
            targets_BS: token ids `[B, S]` to predict; `IGNORE` (-100) where none counts.

        Returns:
            With targets the mean loss, a scalar; without, the logits `[B, S, V]`. Both the same on all TP ranks.
        """
        sequence_length = tokens_BS.shape[1]
        tokens_SB = pad_sequence(tokens_BS.t(), self.sequence_multiple, value=0)
        x = self.embedding(tokens_SB) + self.positions(sequence_length, tokens_SB.shape[0])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return self.head.logits(x, sequence_length) if targets_BS is None else self.head.loss(x, targets_BS)
