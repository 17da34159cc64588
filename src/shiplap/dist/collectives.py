"""The communication of the hot path, along dim 0, over one process group. The only torch.distributed calls there.

Every function starts its communication and returns at once with a `Handle`; blocking is `.wait()` right away. All
ranks of a group must call the same functions in the same order. `group=None` stands for a group of this rank alone.

Shapes: `x_sBH` is this rank's shard `[S/R, …]`, `x_SBH` the whole `[S, …]`, R the group's size.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shiplap.dist.hooks import Work, record_collective, record_wait
from shiplap.dist.pacing import Pacer


class RankGroup:
    """Some ranks, and this rank's place among them.

    Layers, models and autograd graphs hold this rather than torch's process group, so that `destroy_all_env` can end
    the group while they live on. Gloo's threads end with the group; one that still runs when the interpreter ends can
    abort the process.

    Attributes:
        size: number of ranks.
        rank: this rank's place, in 0 … size - 1.
        pacer: starts the transfers between the ranks one after the other; None where all are started at once.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """The ranks of a process group that this rank belongs to."""
        self._process_group: dist.ProcessGroup | None = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.pacer: Pacer | None = None
        self._paced: RankGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "RankGroup":
        """The same ranks: a copied layer communicates with the ranks that the original does."""
        return self

    @property
    def paced(self) -> "RankGroup":
        """The same ranks, whose transfers are paced."""
        if self._paced is None:
            self._paced = RankGroup(self.process_group)
            self._paced.pacer = Pacer()
        return self._paced

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's process group.

        Raises:
            RuntimeError: after `close`.
        """
        if self._process_group is None:
            raise RuntimeError("This process group is gone: destroy_all_env() was called. Make the layer again.")
        return self._process_group

    def close(self) -> None:
        """Let go of the process group, and of the thread that paces its transfers."""
        self._process_group = None
        if self._paced is not None:
            self._paced.close()
        if self.pacer is not None:
            self.pacer.close()


Group = RankGroup | None
MAX = dist.ReduceOp.MAX
AnyGroup = RankGroup | dist.ProcessGroup | None


def as_group(group: AnyGroup) -> Group:
    """The group that a caller gave, as ours: it may be ours, torch's own, or None."""
    return RankGroup(group) if isinstance(group, dist.ProcessGroup) else group


# PyTorch 2.13 renamed the two collectives and warns about the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A tensor that communication is still filling in.

    On CUDA `wait` orders the current stream after the communication; on Gloo it blocks the host. Until then it
    holds the buffers that the communication reads, so that they are neither reused nor kept longer than needed:
    the order comes from events, without `record_stream`.
    """

    def __init__(self, value: Tensor, works: Sequence["Work | Handle"] = (), reads: Sequence[Tensor] = ()) -> None:
        """A value, the communications that it waits for, and the buffers that they read."""
        self._value = value
        self._works = works
        self._reads = reads

    def wait(self) -> Tensor:
        """The finished tensor."""
        if self._works:
            with record_wait():
                for work in self._works:
                    work.wait()
        self._works = self._reads = ()
        return self._value


class SumHandle(Handle):
    """The sum of several tensors of one shape, some of them still on their way."""

    def __init__(self, parts: Sequence[Handle]) -> None:
        """The parts, in the order in which they are added; they must be of one dtype and device."""
        self._parts = parts

    def wait(self) -> Tensor:
        """The sum, added up in float32 at least and rounded once, in the parts' dtype."""
        first, *others = [part.wait() for part in self._parts]
        total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for other in others:
            total += other
        self._parts = ()
        return total.to(first.dtype)


class ConcatHandle(Handle):
    """Tensors that are the features, from left to right, of one, some of them still on their way."""

    def __init__(self, chunks: Sequence[Handle]) -> None:
        """The chunks; they must have the same dims but for the last one."""
        self._chunks = chunks

    def wait(self) -> Tensor:
        """All features."""
        whole = torch.cat([chunk.wait() for chunk in self._chunks], dim=-1)
        self._chunks = ()
        return whole


def size_of(group: Group) -> int:
    """Number of ranks in the group."""
    return 1 if group is None else group.size


def rank_in(group: Group) -> int:
    """This rank's place in the group."""
    return 0 if group is None else group.rank


def all_gather(x_sBH: Tensor, group: Group) -> Handle:
    """Start gathering the shards `[S/R, …]` of all ranks, in rank order, into `[S, …]`."""
    if group is None:
        return Handle(x_sBH)
    x_sBH = x_sBH.contiguous()
    x_SBH = x_sBH.new_empty(group.size * x_sBH.shape[0], *x_sBH.shape[1:])
    with record_collective("all-gather", x_sBH) as watched:
        work = _all_gather_single(x_SBH, x_sBH, group=group.process_group, async_op=True)
    return Handle(x_SBH, watched([work]), [x_sBH])


def reduce_scatter(x_SBH: Tensor, group: Group, *, out: Tensor | None = None) -> Handle:
    """Start summing `[S, …]` over the ranks; each gets its rows `[S/R, …]` of the sum, in `out` if that is given."""
    if group is None:
        return Handle(x_SBH if out is None else out.copy_(x_SBH))
    x_SBH = x_SBH.contiguous()
    x_sBH = x_SBH.new_empty(x_SBH.shape[0] // group.size, *x_SBH.shape[1:]) if out is None else out
    with record_collective("reduce-scatter", x_SBH) as watched:
        work = _reduce_scatter_single(x_sBH, x_SBH, group=group.process_group, async_op=True)
    return Handle(x_sBH, watched([work]), [x_SBH])


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Handle:
    """Start summing `x` over the ranks, in place; every rank gets the sum."""
    if group is None:
        return Handle(x)
    with record_collective("all-reduce", x) as watched:
        work = dist.all_reduce(x, op=op, group=group.process_group, async_op=True)
    return Handle(x, watched([work]))


def reduce(x: Tensor, destination: int, group: Group) -> Handle:
    """Start summing `x` over the ranks, in place, into rank `destination` of the group; elsewhere `x` is scratch."""
    if group is None:
        return Handle(x)
    with record_collective("reduce", x) as watched:
        work = dist.reduce(x, group_dst=destination, group=group.process_group, async_op=True)
    return Handle(x, watched([work]))


def broadcast(x: Tensor, source: int, group: Group) -> Handle:
    """Start copying `x` from rank `source` of the group to all others, in place; there it is overwritten."""
    if group is None:
        return Handle(x)
    with record_collective("broadcast", x) as watched:
        work = dist.broadcast(x, group_src=source, group=group.process_group, async_op=True)
    return Handle(x, watched([work]))


def send(x: Tensor, to: int, group: RankGroup) -> Handle:
    """Start sending `x` to rank `to` of the group, which must `receive` it."""
    with record_collective("send", x) as watched:
        works = _alone(dist.P2POp(dist.isend, x, group=group.process_group, group_peer=to))
    return Handle(x, watched(works))


def receive(x: Tensor, source: int, group: RankGroup) -> Handle:
    """Start filling `x` from what rank `source` of the group sends."""
    with record_collective("receive", x) as watched:
        works = _alone(dist.P2POp(dist.irecv, x, group=group.process_group, group_peer=source))
    return Handle(x, watched(works))


def _alone(operation: dist.P2POp) -> list[dist.Work]:
    # As a batch of one: NCCL makes a communicator of its own for a pair of ranks that does anything else.
    return dist.batch_isend_irecv([operation])


def batch_send_recv(outgoing: Tensor, to: int, incoming: Tensor, source: int, *, group: RankGroup) -> Handle:
    """Start sending `outgoing` to rank `to` of the group while receiving `incoming` from rank `source`."""
    pacer = None if incoming.is_cuda else group.pacer
    # Paced messages have a tag of their own: the others do not wait for them.
    tag = 0 if pacer is None else 1
    # The receive comes first. Gloo sends only to who has said that it receives, and says so on the same connection as
    # the data: behind an outgoing tensor the peer would hear of it late, and both directions would take turns.
    operations = [
        dist.P2POp(dist.irecv, incoming, group=group.process_group, group_peer=source, tag=tag),
        dist.P2POp(dist.isend, outgoing, group=group.process_group, group_peer=to, tag=tag),
    ]
    with record_collective("send and receive", outgoing) as watched:
        works: Sequence[Work]
        if pacer is None:
            works = dist.batch_isend_irecv(operations)
        else:
            works = [pacer.add(lambda: dist.batch_isend_irecv(operations))]
    return Handle(incoming, watched(works), [outgoing])


def send_to_each(
    outgoing: Sequence[Tensor], *, group: RankGroup, incoming: Sequence[Tensor] | None = None
) -> dict[int, Handle]:
    """Start sending each of the other ranks its tensor of `outgoing`, the next one first, and receiving theirs.

    Args:
        outgoing: a tensor for each rank; the own one stays where it is.
        group: the ranks.
        incoming: where to, a tensor for each rank. Default: new memory.

    Returns:
        The tensors from the others, by rank.
    """
    parts: dict[int, Handle] = {}
    for distance in range(1, group.size):
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        into = torch.empty_like(outgoing[to]) if incoming is None else incoming[source]
        parts[source] = batch_send_recv(outgoing[to], to, into, source, group=group)
    return parts


def all_gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Gather shards `[…, V/R]` of all ranks into `[…, V]`, and wait for them."""
    if group is None:
        return x
    parts = all_gather(x.unsqueeze(0), group).wait()
    return torch.cat(tuple(parts), dim=-1)
