"""Cross-entropy of logits whose vocabulary is divided over the TP ranks, without ever gathering them.

Shoeybi et al. 2019, section 3: the ranks exchange one maximum, one sum of exponentials and one target logit per token.
"""

from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - names the maximum; the communication is comm's
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiplap.comm.collectives import Group, all_reduce, rank_in

IGNORE = -100
"""The target of a token that is not counted, as in `torch.nn.functional.cross_entropy`."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: Group
    ) -> Tensor:
        num_columns = logits.shape[-1]
        first = rank_in(group) * num_columns
        # One float32 copy, worked on in place: it becomes the probabilities that backward needs.
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        num_valid = min(max(vocab_size - first, 0), num_columns)
        probabilities[..., num_valid:] = float("-inf")

        maximum = all_reduce(probabilities.amax(dim=-1), group, dist.ReduceOp.MAX).wait()
        probabilities -= maximum[..., None]
        local = targets - first
        elsewhere = (local < 0) | (local >= num_columns)
        index = local.masked_fill(elsewhere, 0)[..., None]
        target_logit = probabilities.gather(-1, index)[..., 0].masked_fill(elsewhere, 0.0)
        probabilities.exp_()
        sums = all_reduce(torch.stack([target_logit, probabilities.sum(dim=-1)]), group).wait()
        target_logit, total = sums.unbind()
        probabilities /= total[..., None]

        counted = targets != IGNORE
        ctx.save_for_backward(probabilities, index, elsewhere, counted)
        ctx.dtype = logits.dtype
        return (total.log() - target_logit).masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, elsewhere, counted = ctx.saved_tensors
        grad = probabilities.clone()
        grad.scatter_add_(-1, index, -(~elsewhere)[..., None].to(grad.dtype))
        grad *= (dloss * counted)[..., None]
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, vocab_size: int, group: Group) -> Tensor:
    """The cross-entropy of every token.

    Args:
        logits: `[…, Vp/R]`, this rank's columns of the logits over the padded vocabulary.
        targets: `[…]`, token ids in 0 … V - 1, or `IGNORE`; the same on all ranks.
        vocab_size: V; columns past it pad the vocabulary and get no probability.
        group: the TP ranks.

    Returns:
        `[…]` in float32 (float64 for such logits), the same on all ranks; 0 where the target is `IGNORE`.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, group)
    return result
