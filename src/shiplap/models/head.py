"""From the last hidden states to a loss or to logits; vocabulary and sequence padding end here."""

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group
from shiplap.comm.mappings import gather_last_dim
from shiplap.tensor_parallel.cross_entropy import IGNORE, vocab_parallel_cross_entropy


class OutputHead(nn.Module):
    """The projection to the vocabulary, and what is made of it."""

    def __init__(self, projection: nn.Module, *, vocab_size: int, group: Group) -> None:
        """Wrap the column-parallel projection to the vocabulary.

        Args:
            projection: `[S/R, B, H]` to `[S, B, Vp/R]`.
            vocab_size: V, unpadded.
            group: the TP ranks.
        """
        super().__init__()
        self.projection = projection
        self.vocab_size = vocab_size
        self.group = group

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
