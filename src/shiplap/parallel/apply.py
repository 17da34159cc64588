"""The one place that makes, out of a built model, the module that the trainer steps on.

The order is fixed, for each step wraps or rewrites what the ones before it left:

| step | where |
|---|---|
| tensor parallelism | already in the layers that the model was built from |
| recomputation | already in its blocks, which run their own forward again |
| data parallelism | here: the outermost, since it hooks onto the parameters as they are in the end |
"""

from torch import nn

from shiplap.dist import GlobalEnv
from shiplap.parallel.data import replicate


def apply(model: nn.Module, env: GlobalEnv) -> nn.Module:
    """The module that gives a training loss, with its gradients averaged over the replicas in backward.

    Args:
        model: this rank's part, on its device; parameters that train have been chosen, and adapters added.
        env: the groups.
    """
    return replicate(model, env.group("dp"))
