"""What all decoder-only models share: the way from tokens to logits or a loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config.model import TransformerConfig
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group, size_of
from shiplap.families import FAMILIES
from shiplap.layers.cache import KeyValueCache
from shiplap.layers.dropout import Dropout
from shiplap.layers.moe import Balance, Routing, balance
from shiplap.models.block import DecoderBlock
from shiplap.models.build import Build, Stage
from shiplap.models.head import OutputHead
from shiplap.tensor_parallel.embedding import VOCABULARY, VocabParallelEmbedding
from shiplap.tensor_parallel.linear import ColumnParallelLinear
from shiplap.tensor_parallel.parameters import draw_by_name


class Hidden(NamedTuple):
    """What goes from block to block, and from one stage of a model to the next.

    Attributes:
        states: `[S/R, B, H]`, S padded (without sequence parallelism `[S, B, H]`).
        sequence_length: number of tokens without padding.
        auxiliary_loss: of the blocks so far, in training; None where they have none.
    """

    states: Tensor
    sequence_length: int
    auxiliary_loss: Tensor | None = None


class DecoderModel(nn.Module):
    """A decoder-only model; this rank's part of it. What its parts are, the family says.

    It can be cut: a stage has some of the blocks, called as in the whole model, and the ends or not. Stages in a row
    compute `head_of(through_blocks(… through_blocks(embed(tokens))))`, which is what `forward` is.
    """

    def __init__(self, build: Build) -> None:
        """Put the parts together; the weights are left for `draw_by_name` or a loader.

        Raises:
            UserError: the TP size does not divide heads, hidden or feed-forward size.
        """
        super().__init__()
        config, parallel, group, stage = build.config, build.parallel, build.group, build.built_stage
        config.check_divisible_by(parallel.tensor_parallel_size)
        self.config = config
        self.token_group = build.token_group
        self._balance: Balance | None = None
        self.embedding: VocabParallelEmbedding | None = None
        self.positions: nn.Module | None = None
        self.final_norm: nn.Module | None = None
        self.head: OutputHead | None = None
        # A last stage whose head is tied holds the table too, under its own name.
        if stage.has_embedding or (stage.has_head and config.tie_embeddings):
            self.embedding = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, config=parallel, group=group, init=build.init
            )
        if stage.has_embedding:
            self.positions = build.learned_positions()
        self.dropout = Dropout(config.dropout, group=build.token_group)
        self.blocks = nn.ModuleDict({str(number): self._make_block(build) for number in stage.blocks})
        if stage.has_head:
            self.final_norm = build.norm()
            self.head = self._make_head(build)

    def _make_block(self, build: Build) -> DecoderBlock:
        return DecoderBlock(
            attention_norm=build.norm(),
            attention=build.attention(),
            mlp_norm=build.norm(),
            mlp=build.experts() if build.architecture.has_experts else build.mlp(),
            dropout=Dropout(build.config.dropout, group=build.token_group),
        )

    def _make_head(self, build: Build) -> OutputHead:
        config = build.config
        projection = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            False,
            config=build.parallel,
            group=build.group,
            weight=self.embedding.weight if config.tie_embeddings and self.embedding is not None else None,
            split=VOCABULARY,
            init=build.init,
        )
        return OutputHead(projection, vocab_size=config.vocab_size, group=build.group, token_group=build.token_group)

    def take_balance(self) -> Balance | None:
        """How evenly experts were used in training since this was last asked, of this replica; None without experts."""
        taken, self._balance = self._balance, None
        return taken

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
        hidden = self.through_blocks(self.embed(tokens_BS, cache), cache)
        return self.head_of(hidden, targets_BS, last_only=last_only)

    def embed(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Hidden:
        """The tokens' vectors, with their positions where these are learned. The first stage has this."""
        assert self.embedding is not None
        sequence_length = tokens_BS.shape[1]
        tokens_SB = F.pad(tokens_BS.t(), (0, 0, 0, -sequence_length % size_of(self.token_group)))
        x = self.embedding(tokens_SB)
        if self.positions is not None:
            start = 0 if cache is None else cache.length
            x = x + self.positions(sequence_length, tokens_SB.shape[0], start=start)
        return Hidden(self.dropout(x), sequence_length)

    def through_blocks(self, hidden: Hidden, cache: KeyValueCache | None = None) -> Hidden:
        """Through the blocks that are here; in training the loss of their experts is added to what it was."""
        if cache is not None:
            cache.begin(hidden.sequence_length)
        x, routings = hidden.states, []
        for block in self.blocks.values():
            x, routing = block(x, cache)
            routings += [] if routing is None else [routing]
        if cache is not None:
            cache.end()
        loss = hidden.auxiliary_loss
        if routings and self.training:
            here = self._balance_loss(routings, hidden.sequence_length)
            loss = here if loss is None else loss + here
        return Hidden(x, hidden.sequence_length, loss)

    def _balance_loss(self, routings: Sequence[Routing], sequence_length: int) -> Tensor:
        here = balance(
            routings, sequence_length=sequence_length, group=self.token_group, num_layers=self.config.num_layers
        )
        self._balance = here.detach() if self._balance is None else self._balance + here.detach()
        return self.config.router_aux_loss_coefficient * here.loss

    def head_of(self, hidden: Hidden, targets_BS: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """The loss or the logits, as `forward` gives them. The last stage has this."""
        assert self.final_norm is not None
        assert self.head is not None
        x = self.final_norm(hidden.states)
        if targets_BS is None:
            logits_of = self.head.last_logits if last_only else self.head.logits
            return logits_of(x, hidden.sequence_length)
        loss = self.head.loss(x, targets_BS)
        return loss if hidden.auxiliary_loss is None else loss + hidden.auxiliary_loss


def build_model(
    family: str,
    config: TransformerConfig,
    *,
    parallel: ModelParallelConfig,
    group: Group,
    seed: int | None,
    stage: Stage | None = None,
) -> DecoderModel:
    """Build this rank's part of a model, on the CPU in float32.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        seed: of the initial weights; None leaves all but norms and biases as memory happens to be, for a loader.
        stage: the part to build; None: the whole model.

    Raises:
        UserError: the TP size does not divide heads, hidden or feed-forward size.
    """
    model = DecoderModel(
        Build(architecture=FAMILIES[family].architecture, config=config, parallel=parallel, group=group, stage=stage)
    )
    if seed is not None:
        draw_by_name(model, seed=seed, group=group)
    return model
