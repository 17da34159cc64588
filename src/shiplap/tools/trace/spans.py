"""What can be recorded, and what it is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["column", "row"]
SpanKind = Literal["step", "module", "product", "communication", "wait"]
Lane = Literal["GEMM", "AG", "RS", "other comm", "waiting", "layers", "other kernels"]

LANES: tuple[Lane, ...] = ("layers", "GEMM", "AG", "RS", "other comm", "waiting", "other kernels")
"""In the order in which a viewer shows them."""

LANE_OF_PRIMITIVE: Mapping[str, Lane] = {"gather": "AG", "prefetch": "AG", "scatter": "RS", "": "other comm"}

MODEL = "model"
"""Stands for a layer where no single one runs in forward: the loss."""
OUTSIDE = "step"
"""Stands for a layer outside of forward and backward: the gradient's norm, and means over replicas."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a step something happens.

    Attributes:
        layer: module path, `model` or `step`.
        direction: `forward`, `recompute` (forward, run again in backward), `backward`, or `` outside of the model.
        primitive: `gather`, `scatter` or `prefetch`, or `` where none runs.
        method: of the primitive.
    """

    layer: str = OUTSIDE
    direction: str = ""
    primitive: str = ""
    method: str = ""

    def communication_site(self, kind: LayerKind | None) -> str:
        """The site of a communication in a layer of this kind, as in `shiplap.overlap.plan` where it is one."""
        if self.direction != "backward" or not self.primitive:
            return self.direction
        return "wgrad" if kind == "column" and self.primitive != "scatter" else "dgrad"


@dataclass(kw_only=True)
class Span:
    """Something that this rank's host did or started; times in ns of `time.perf_counter_ns`.

    Attributes:
        number: counted from 0; its annotation in PyTorch's profiler begins with it.
        kind: of thing.
        layer: see `Place`.
        site: `forward`, `recompute`, `dgrad`, `wgrad`, or `backward` where it is none of these.
        method: of the site; the collective, where the communication belongs to no site.
        lane: where it is shown.
        begin_ns: it began.
        end_ns: it ended: of a communication on the CPU when it was finished, on CUDA when it had been started.
        collective: of a communication.
        num_bytes: that this rank puts into the communication.
        of: of a wait, the number of the communication.
    """

    number: int
    kind: SpanKind
    layer: str
    site: str
    lane: Lane
    method: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    collective: str = ""
    num_bytes: int = 0
    of: int | None = None

    @property
    def name(self) -> str:
        """Such as `blocks.0.mlp.fc1 forward ring`."""
        return " ".join(part for part in (self.layer, self.site, self.method) if part)

    @property
    def annotation(self) -> str:
        """Its name in PyTorch's profiler."""
        return f"{ANNOTATION}{self.number} {self.kind} {self.name}"


ANNOTATION = "shiplap:"
