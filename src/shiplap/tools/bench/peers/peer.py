"""What a peer must know, and whether it computes what we compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shiplap.tuning.candidates import sequential_plan
from shiplap.tuning.parts import Part
from shiplap.tuning.probe import slowest_rank

_CLOSE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Norm of the difference over the norm. Sums in another order differ by less, what is wrong by more: assumptions."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A parameter that was copied from one of ours, or from some of its rows.

    Attributes:
        ours: the parameter.
        theirs: this rank's part of it, trained by the peer.
        rows: of ours.
    """

    ours: nn.Parameter
    theirs: nn.Parameter
    rows: slice


class PeerStep(Protocol):
    """A peer in a part's place.

    Attributes:
        module: takes `part.x`; its trained parameters are those that there are gradients for.
        copies: where its parameters come from.
    """

    module: nn.Module
    copies: Sequence[Copied]

    def __call__(self) -> tuple[Tensor, Sequence[Tensor]]:
        """A step as `part.run` does it, all of it finished."""


class Peer(Protocol):
    """Somebody else's tensor parallelism.

    Attributes:
        title: in tables.
    """

    title: str

    def why_not(self, part: Part) -> str | None:
        """Why it cannot stand in the part's place here; None if it can. The same on all ranks."""

    def step(self, part: Part) -> PeerStep:
        """Make it, with the part's weights."""


def seat(peer: Peer, part: Part) -> PeerStep | str:
    """A peer in a part's place, or why it is not there. All ranks must ask together; they get the same."""
    why_not = peer.why_not(part)
    if why_not is not None:
        return why_not
    step = peer.step(part)
    off = differences(part, step)
    wrong = [f"{name} is off by {error:.0e}" for name, error in off.items() if not error < _CLOSE[part.workload.dtype]]
    return f"computes something else: {', '.join(wrong)}" if wrong else step


def differences(part: Part, step: PeerStep) -> dict[str, float]:
    """How far a peer's output and gradients are from ours without overlap, on the rank where that is most.

    Args:
        part: ours; both run without dropout here.
        step: the peer.
    """
    part.set({name: sequential_plan(layer) for name, layer in part.layers.items()})
    for module in (part.module, step.module):
        module.eval()
    y, gradients = part.run(part.module)
    their_y, their_gradients = step()
    for module in (part.module, step.module):
        module.train()
    has_dx = int(part.x.requires_grad)
    errors = {"y": _error(their_y, y)}
    if has_dx:
        errors["dx"] = _error(their_gradients[0], gradients[0])
    ours, theirs = (
        {id(p): gradient for p, gradient in zip(_trained(module), own[has_dx:], strict=True)}
        for module, own in ((part.module, gradients), (step.module, their_gradients))
    )
    of_weights = [
        # Against all of it: without rotary positions the bias of keys has no gradient but what is rounded.
        _error(theirs[id(copied.theirs)], ours[id(copied.ours)][copied.rows], of=ours[id(copied.ours)])
        for copied in step.copies
        if copied.ours.requires_grad
    ]
    errors["dW"] = max(of_weights, default=0.0)
    return {name: slowest_rank(error, part.env) for name, error in errors.items()}


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _error(theirs: Tensor, ours: Tensor, *, of: Tensor | None = None) -> float:
    local: Tensor = theirs.to_local() if hasattr(theirs, "to_local") else theirs
    off: Tensor = torch.linalg.vector_norm(local.detach().double() - ours.detach().double())
    return float(off / torch.linalg.vector_norm((ours if of is None else of).detach().double()))
