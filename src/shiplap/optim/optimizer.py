"""AdamW (Loshchilov & Hutter 2019), with weight decay on matrices only."""

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
