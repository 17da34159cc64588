"""Parameters of which each rank holds a part: how they are made, drawn, listed, gathered and kept alike.

An initial weight of a model depends on the run's seed and the parameter's full name only. So it is the same whatever
the layout, and a rank that holds some of a model's layers draws these without drawing the others'.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor, nn

from shiplap.dist.collectives import Group, all_reduce, receive, send, size_of
from shiplap.tensor_parallel.placement import TP, Coordinate, Placement, Split, along_tp

Init = Callable[[Tensor], Tensor]
"""Fills a whole tensor in place from the default generator, and returns it."""


@dataclass(frozen=True)
class ByName:
    """An initial weight that waits until its parameter has a full name: `draw_by_name` or a loader fills it.

    Attributes:
        init: how it is drawn then.
    """

    init: Init


class PlacedModule(nn.Module):
    """A module that says how its own parameters are divided.

    Attributes:
        placements: by the parameter's name in this module. One that is not listed is held whole by every rank.
        by_name: how those that are still to be drawn are drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.placements: dict[str, Placement] = {}
        self.by_name: dict[str, Init] = {}

    def new_parameter(self, name: str, placement: Placement, group: Group, init: Init | ByName) -> nn.Parameter:
        """This rank's part of a new parameter, which the caller assigns to its name.

        Args:
            name: in this module.
            placement: how it is divided.
            group: the TP ranks, which must draw from equally seeded generators, in the same order.
            init: draws it whole, now or when the name is known; until then it is as memory happens to be.
        """
        self.placements[name] = placement
        at = along_tp(group)
        if isinstance(init, ByName):
            self.by_name[name] = init.init
            return nn.Parameter(torch.empty(placement.local_shape(at)))
        with torch.no_grad():
            return nn.Parameter(placement.take(init(torch.empty(placement.full_shape)), at))


def named_placements(module: nn.Module) -> Iterator[tuple[str, Placement]]:
    """Every parameter's name with its placement. Shared parameters come once."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        placements = owner.placements if isinstance(owner, PlacedModule) else {}
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                placement = placements.get(name) or Placement(full_shape=tuple(parameter.shape))
                yield f"{path}.{name}" if path else name, placement


@torch.no_grad()
def draw_by_name(module: nn.Module, *, seed: int, group: Group, path: str = "") -> None:
    """Draw every parameter that was left for it, on the CPU; the default generator is left as it was.

    Args:
        module: the model, or a part of it.
        seed: of the run.
        group: the TP ranks.
        path: of the module in the model.
    """
    generator = torch.default_generator
    before = generator.get_state()
    for owner_path, owner in module.named_modules(prefix=path):
        if isinstance(owner, PlacedModule):
            for name, init in owner.by_name.items():
                generator.manual_seed(_seed_of(seed, f"{owner_path}.{name}"))
                placement = owner.placements[name]
                whole = init(torch.empty(placement.full_shape, device="cpu"))
                owner.get_parameter(name).copy_(placement.take(whole, along_tp(group)))
    generator.set_state(before)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def shared_split(placement: Placement | None, group: Group) -> Split | None:
    """The split over the TP ranks, where several of them hold some rows; else None: gradients are this rank's alone."""
    split = None if placement is None else placement.splits.get(TP)
    return split if split is not None and split.is_shared(size_of(group)) else None


def sum_shared_rows(grad: Tensor, split: Split, group: Group) -> Tensor:
    """Complete the gradient of the rows that several ranks hold, each of which has a part of it; in place.

    Afterwards it is the same on all ranks that hold a row. One message, as large as all shared blocks.

    Args:
        grad: of this rank's part, divided along dim 0.
        split: how.
        group: the TP ranks, all of which must call this.
    """
    pairs, num_rows = split.shared(along_tp(group)[TP])
    shared = grad.new_zeros(num_rows, *grad.shape[1:])
    for here, there in pairs:
        shared[there.start : there.stop] = grad[here.start : here.stop]
    all_reduce(shared, group).wait()
    for here, there in pairs:
        grad[here.start : here.stop] = shared[there.start : there.stop]
    return grad


@torch.no_grad()
def gather_to_first(part: Tensor, placement: Placement, group: Group) -> Tensor | None:
    """The whole of a divided tensor on the TP group's first rank, which receives one part after the other.

    All ranks must call this alike. Only the first holds more than it did: the whole, and one part.

    Args:
        part: this rank's.
        placement: how the tensor is divided.
        group: the TP ranks; their parts may differ in size.

    Returns:
        The whole tensor, on the CPU; on other ranks than the first None.
    """
    is_divided = TP in placement.splits
    if group is not None and group.rank > 0:
        if is_divided:
            send(part.detach().contiguous(), 0, group).wait()
        return None
    if not is_divided:
        return part.detach().to("cpu", copy=True)
    whole = part.new_empty(placement.full_shape, device="cpu")
    placement.put(whole, part, along_tp(group))
    if group is not None:
        for rank in range(1, group.size):
            at = {TP: Coordinate(rank, group.size)}
            placement.put(whole, receive(part.new_empty(placement.local_shape(at)), rank, group).wait(), at)
    return whole
