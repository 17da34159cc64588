"""The one place that makes, out of a built model, the module that the trainer steps on.

The order is fixed, for each step wraps or rewrites what the ones before it left:

| step | where |
|---|---|
| tensor parallelism | already in the layers that the model was built from |
| recomputation | here: blocks, or the cores of their attention, run again in backward |
| data parallelism | here: the outermost, since it hooks onto the parameters as they are in the end |
"""

from typing import Literal

from torch import nn

from shiplap.dist import GlobalEnv
from shiplap.layers.attention import SelfAttention
from shiplap.models.block import DecoderBlock
from shiplap.parallel.data import replicate

Recompute = Literal["none", "selective", "full"]


def apply(model: nn.Module, env: GlobalEnv, *, recompute: Recompute) -> nn.Module:
    """The module that gives a training loss, with its gradients averaged over the replicas in backward.

    Args:
        model: this rank's part, on its device; parameters that train have been chosen, and adapters added.
        env: the groups.
        recompute: what backward computes again; see `apply_recompute`.
    """
    apply_recompute(model, recompute)
    return replicate(model, env.group("dp"))


def apply_recompute(model: nn.Module, what: Recompute) -> None:
    """Let backward compute some of forward again instead of keeping what it needs.

    Args:
        model: this rank's part.
        what: `none`, `selective` (the cores of attention) or `full` (whole blocks).
    """
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            module.recompute_all = what == "full"
        elif isinstance(module, SelfAttention):
            module.recompute_core = what == "selective"
