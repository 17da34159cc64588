"""The norm of the whole model's gradient, each parameter counted once, and clipping to it (Pascanu et al. 2013).

Of what several ranks hold, the first of them counts it: rows of shared heads, and parameters that are not divided.
"""

import torch
from torch import Tensor, nn

from shiplap.dist.collectives import Group, all_reduce
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.tensor_parallel.placement import along_tp


def gradient_norm(model: nn.Module, group: Group) -> Tensor:
    """The 2-norm of the gradient of the whole model: a scalar, the same on all TP ranks.

    Args:
        model: after backward; parameters without a gradient do not count.
        group: the TP ranks, all of which must call this.
    """
    parameters = dict(model.named_parameters())
    counted = [
        stretch
        for name, placement in named_placements(model)
        if (gradient := parameters[name].grad) is not None
        for stretch in placement.counted(gradient, along_tp(group))
    ]
    norm = torch.nn.utils.get_total_norm(counted).to(next(model.parameters()).device)
    return all_reduce(norm**2, group).wait().sqrt()


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
