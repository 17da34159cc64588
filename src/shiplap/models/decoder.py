"""What all decoder-only models share: the pre-norm block, and the way from tokens to logits or a loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group, size_of
from shiplap.comm.mappings import gather_last_dim
from shiplap.layers.recompute import recompute
from shiplap.tensor_parallel.cross_entropy import IGNORE, vocab_parallel_cross_entropy


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


def pad_sequence(tokens_SB: Tensor, multiple: int, *, value: int) -> Tensor:
    """Append rows of `value` until `multiple` divides the length of dim 0."""
    missing = -tokens_SB.shape[0] % multiple
    return F.pad(tokens_SB, (0, 0, 0, missing), value=value)


class OutputHead(nn.Module):
    """From the last hidden states to a loss or to logits; vocabulary and sequence padding end here."""

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


def sequence_multiple(sequence_parallel: bool, group: Group) -> int:
    """What the sequence length is padded to a multiple of."""
    return size_of(group) if sequence_parallel else 1
