"""The norm of the whole model's gradient, each parameter counted once, and clipping to it (Pascanu et al. 2013).

A rank holds its shards of the divided parameters, and all of the others. So the squares of the shards are summed over
the TP ranks, rows that several ranks hold counted by the first of them, those of whole parameters counted on one rank's
behalf, and tied parameters come once.
"""

import torch
from torch import Tensor, nn

from shiplap.dist.collectives import Group, all_reduce, rank_in, size_of
from shiplap.tensor_parallel.placement import named_shards


def gradient_norm(model: nn.Module, group: Group) -> Tensor:
    """The 2-norm of the gradient of the whole model: a scalar, the same on all TP ranks.

    Args:
        model: after backward; parameters without a gradient do not count.
        group: the TP ranks, all of which must call this.
    """
    parameters = dict(model.named_parameters())
    divided: list[Tensor] = []
    whole: list[Tensor] = []
    for name, shard in named_shards(model):
        gradient = parameters[name].grad
        if gradient is None:
            continue
        if shard is None:
            whole.append(gradient)
        else:
            divided += shard.counted(gradient, rank_in(group), size_of(group))
    squares = torch.nn.utils.get_total_norm(divided) ** 2
    return (all_reduce(squares, group).wait() + torch.nn.utils.get_total_norm(whole) ** 2).sqrt()


def clip_gradients(model: nn.Module, *, max_norm: float, group: Group) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`.

    Args:
        model: after backward.
        max_norm: the largest norm; 0 turns clipping off.
        group: the TP ranks, all of which must call this.

    Returns:
        The norm before clipping: a scalar, the same on all TP ranks.
    """
    norm = gradient_norm(model, group)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
