"""AdamW (Loshchilov & Hutter 2019), with weight decay on matrices only, and the schedule of its learning rate."""

import math

from torch import nn
from torch.optim import AdamW

from shiplap.config import OptimizerOptions


def build_adamw(model: nn.Module, options: OptimizerOptions, *, fused: bool) -> AdamW:
    """The optimizer of all trainable parameters of a model. Biases and norms have no weight decay.

    Args:
        model: its parameters must be on their device already.
        options: the rates; the learning rate is set before each step, with `set_learning_rate`.
        fused: one kernel for all parameters; for CUDA.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    return AdamW(groups, lr=options.learning_rate, betas=betas, fused=fused)


def set_learning_rate(optimizer: AdamW, learning_rate: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def learning_rate_at(step: int, options: OptimizerOptions) -> float:
    """The learning rate of an optimizer step: linear warm-up, then half a cosine (Loshchilov & Hutter 2017).

    It rises in a straight line from 0, which would be the step before the first, to the peak at step
    `warmup_iteration`, and falls from there to the minimum, which would be the step after the last. So no step is
    wasted on a rate of 0.

    Args:
        step: the optimizer step, from 0.
        options: peak, minimum, and the lengths of warm-up and run in steps.
    """
    peak, minimum = options.learning_rate, options.min_learning_rate
    warmup = options.warmup_iteration
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (options.num_iteration - warmup)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
