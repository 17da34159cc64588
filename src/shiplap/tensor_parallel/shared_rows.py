"""Rows of a divided parameter that several ranks hold, such as those of key-value heads fewer than the ranks."""

from torch import Tensor

from shiplap.dist.collectives import Group, all_reduce, rank_in, size_of
from shiplap.tensor_parallel.placement import Shard


def sum_shared_rows(grad: Tensor, shard: Shard, group: Group) -> Tensor:
    """Complete the gradient of the rows that several ranks hold, each of which has a part of it; in place.

    Afterwards it is the same on all ranks that hold a row. One message, as large as all shared blocks.

    Args:
        grad: of this rank's shard, divided along dim 0.
        shard: the division of the parameter.
        group: the TP ranks, all of which must call this.
    """
    if not shard.is_shared(size_of(group)):
        return grad
    copies, num_rows = shard.shared_rows(rank_in(group), size_of(group))
    shared = grad.new_zeros(num_rows, *grad.shape[1:])
    for here, there in copies:
        shared[there.start : there.stop] = grad[here.start : here.stop]
    all_reduce(shared, group).wait()
    for here, there in copies:
        grad[here.start : here.stop] = shared[there.start : there.stop]
    return grad
