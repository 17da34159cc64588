"""From the last hidden states to a loss or to logits; vocabulary and sequence padding end here."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.dist.collectives import Group, size_of
from shiplap.dist.mappings import gather_from_shard, gather_last_dim, split_to_shard
from shiplap.tensor_parallel.cross_entropy import IGNORE, vocab_parallel_cross_entropy


class OutputHead(nn.Module):
    """The projection to the vocabulary, and what is made of it."""

    def __init__(self, projection: nn.Module, *, vocab_size: int, group: Group, token_group: Group) -> None:
        """Wrap the column-parallel projection to the vocabulary.

        Args:
            projection: `[S/R, B, H]` to `[S, B, Vp/R]`.
            vocab_size: V, unpadded.
            group: the TP ranks.
            token_group: the ranks that each hold a shard of the sequence; None where this rank holds all of it.
        """
        super().__init__()
        self.projection = projection
        self.vocab_size = vocab_size
        self.group = group
        self.token_group = token_group

    def loss(self, hidden: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not `IGNORE`; a scalar, the same on all TP ranks.

        Args:
            hidden: `[S/R, B, H]`, S padded (without sequence parallelism `[S, B, H]`).
            targets_BS: `[B, S]`, S unpadded.
        """
        logits_SBv = self.projection(hidden)
        targets_SB = F.pad(targets_BS.t(), (0, 0, 0, logits_SBv.shape[0] - targets_BS.shape[1]), value=IGNORE)
        losses = vocab_parallel_cross_entropy(logits_SBv, targets_SB, vocab_size=self.vocab_size, group=self.group)
        return losses.sum() / (targets_SB != IGNORE).sum().clamp(min=1)

    def logits(self, hidden: Tensor, sequence_length: int) -> Tensor:
        """All logits `[B, S, V]`, unpadded, the same on all TP ranks."""
        logits_SBV = gather_last_dim(self.projection(hidden), self.group)
        return logits_SBV[:sequence_length, :, : self.vocab_size].transpose(0, 1)

    def last_logits(self, hidden: Tensor, sequence_length: int) -> Tensor:
        """The logits `[B, 1, V]` of the last token, the same on all TP ranks; the others' are not computed.

        Without gradients: those of the hidden states would come out summed over the token group.
        """
        assert not torch.is_grad_enabled()
        last_1BH = gather_from_shard(hidden, self.token_group)[sequence_length - 1 : sequence_length]
        # The projection takes a sequence shard, so the one token is padded like any sequence.
        padded = F.pad(last_1BH, (0, 0, 0, 0, 0, size_of(self.token_group) - 1))
        return self.logits(split_to_shard(padded, self.token_group), 1)
