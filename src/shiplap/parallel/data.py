"""DistributedDataParallel where there are several replicas, the plain model where there is one."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shiplap.dist.collectives import Group


def replicate(model: nn.Module, group: Group) -> nn.Module:
    """The model, its gradients averaged over the replicas in backward.

    Args:
        model: on its device, with the same weights on all ranks of the group.
        group: the ranks that hold the same part of each replica; None where there is one replica.
    """
    if group is None:
        return model
    return DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)


def accumulating(replica: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Run one micro-batch of a step inside: gradients are averaged over the replicas in the last one only.

    Args:
        replica: what `replicate` gave.
        last: whether this is the step's last micro-batch.
    """
    if isinstance(replica, DistributedDataParallel) and not last:
        return replica.no_sync()
    return nullcontext()
