"""Cross-entropy of logits whose vocabulary is divided over the TP ranks, without ever gathering them.

Shoeybi et al. 2019, section 3: the ranks exchange one maximum, one sum of exponentials and one target logit per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiplap.dist.collectives import MAX, Group, all_reduce, rank_in

IGNORE = -100
"""The target of a token that is not counted, as in `torch.nn.functional.cross_entropy`."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits and three numbers per token; the probabilities are computed again in backward.

    Logits are the largest tensor of a training step, so what counts is how often they pass through memory: each way,
    PyTorch's fused softmax over this rank's columns does it once, and the ranks' shares are put together per token.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: Group
    ) -> Tensor:
        num_columns = logits.shape[-1]
        first = rank_in(group) * num_columns
        ctx.num_valid = min(max(vocab_size - first, 0), num_columns)
        logits.detach()[..., ctx.num_valid :] = float("-inf")
        local_maximum, local_sum = _maximum_and_sum_exp(logits, is_empty=ctx.num_valid == 0)
        maximum = all_reduce(local_maximum.clone(), group, MAX).wait()
        local_sum *= (local_maximum - maximum).exp()

        local = targets - first
        elsewhere = (local < 0) | (local >= num_columns)
        index = local.masked_fill(elsewhere, 0)[..., None]
        target_logit = (logits.gather(-1, index)[..., 0] - maximum).masked_fill(elsewhere, 0.0)
        target_logit, total = all_reduce(torch.stack([target_logit, local_sum]), group).wait().unbind()

        counted = targets != IGNORE
        ctx.save_for_backward(logits, index, local_sum / total * counted, counted & ~elsewhere)
        return (total.log() - target_logit).masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, index, share, is_here = ctx.saved_tensors
        if ctx.num_valid == 0:
            return torch.zeros_like(logits), None, None, None
        # Softmax over this rank's columns, times its share of the whole sum of exponentials: softmax over all columns.
        local_softmax = torch.softmax(logits, dim=-1, dtype=share.dtype)
        grad = torch.mul(local_softmax, (dloss * share)[..., None], out=torch.empty_like(logits))
        grad.scatter_add_(-1, index, -(dloss * is_here)[..., None].to(grad.dtype))
        return grad, None, None, None


def _maximum_and_sum_exp(logits: Tensor, *, is_empty: bool) -> tuple[Tensor, Tensor]:
    """The maximum over the last dim, and `Σ exp(logit - maximum)`, in float32 at least; -inf and 0 if none counts."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if is_empty:
        nothing = logits.new_zeros(logits.shape[:-1], dtype=dtype)
        return nothing - torch.inf, nothing
    maximum, where = logits.max(dim=-1, keepdim=True)
    # The fused log-softmax is the one kernel that reads bfloat16 and sums in float32: at the maximum it is -log Σ.
    log_probability = torch.log_softmax(logits, dim=-1, dtype=dtype).gather(-1, where)
    return maximum[..., 0].to(dtype), (-log_probability[..., 0]).exp()


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, vocab_size: int, group: Group) -> Tensor:
    """The cross-entropy of every token.

    Args:
        logits: `[…, Vp/R]`, this rank's columns of the logits over the padded vocabulary. Those past V are
            overwritten with -inf.
        targets: `[…]`, token ids in 0 … V - 1, or `IGNORE`; the same on all ranks.
        vocab_size: V; columns past it pad the vocabulary and get no probability.
        group: the TP ranks.

    Returns:
        `[…]` in float32 (float64 for such logits), the same on all ranks; 0 where the target is `IGNORE`.
    """
    result: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, group)
    return result
