"""The passes of the model's kinds of parallel layers, each in all the ways that it could be done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from shiplap.config import ModelParallelConfig
from shiplap.dist import GlobalEnv
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.inspection.sites import BYTES_OF, folded_path
from shiplap.models.decoder import DecoderModel
from shiplap.overlap import registry
from shiplap.overlap.plan import ColumnPlan, Keeps
from shiplap.overlap.primitives import Method
from shiplap.tools.bench.subject import COMMUNICATION, MEASURED, PRODUCTS, SWITCHES, Subject
from shiplap.tuning.candidates import Pass, Plan, candidates, with_fields
from shiplap.tuning.kinds import kinds_of
from shiplap.tuning.measured import Description
from shiplap.tuning.probe import Probe, Workload

PlanOf = Callable[[ParallelLayer], Plan]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are as fast as one another.

    Attributes:
        name: their folded paths.
        count: of them.
        layer: the first.
        description: what decides their speed.
    """

    name: str
    count: int
    layer: ParallelLayer
    description: Description

    @property
    def directions(self) -> tuple[Pass, ...]:
        """The passes that communicate."""
        return ("forward", "backward") if self.layer.has_backward else ("forward",)


def layer_kinds(model: DecoderModel) -> list[LayerKind]:
    """The kinds of the model's parallel layers, in its order."""
    kinds = kinds_of(parallel_layers(model))
    folded = [{folded_path(path)[0] for path in kind.paths} for kind in kinds]
    is_alone = [all(names.isdisjoint(other) for other in folded if other is not names) for names in folded]
    return [
        LayerKind(
            name=_name(kind.paths, is_alone=alone),
            count=len(kind.paths),
            layer=kind.layer,
            description=kind.description,
        )
        for kind, alone in zip(kinds, is_alone, strict=True)
    ]


def _name(paths: Sequence[str], *, is_alone: bool) -> str:
    """Folded; with the numbers of the blocks where those of others differ."""
    blocks: dict[str, list[int]] = {}
    for path in paths:
        folded, number = folded_path(path)
        blocks.setdefault(folded, []).append(number)
    if is_alone:
        return ", ".join(blocks)
    return ", ".join(folded.replace("*", ranges(numbers)) for folded, numbers in blocks.items())


def ranges(numbers: Sequence[int]) -> str:
    """`1-11`, or `0,4,8`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first + 1 == len(numbers):
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What a pass can be done with.

    Attributes:
        plans: the candidates, by name; nothing overlapped first.
        communication: plans that communicate differently, by their variant's name; nothing overlapped first.
    """

    plans: Mapping[str, Plan]
    communication: Mapping[str, Plan]


def ways_of(layer: ParallelLayer, direction: Pass, parallel: ModelParallelConfig, *, with_pacing: bool = True) -> Ways:
    """The candidates, and those of them that communicate differently if there is nothing to hide behind."""
    keeps: Keeps = layer.module.plan.keeps if isinstance(layer.module.plan, ColumnPlan) else "shard"
    plans = candidates(layer, direction, parallel, keeps=keeps, with_pacing=with_pacing)
    communication: dict[str, Plan] = {}
    for name, plan in plans.items():
        # In bulk these are the same collectives as without overlap, only started at another time.
        if not any(_is_bulk(getattr(plan, field.name)) for field in fields(plan)):
            communication[COMMUNICATION + name] = plan
    return Ways(plans=plans, communication=communication)


def _is_bulk(method: object) -> bool:
    if not isinstance(method, Method) or method == registry.SEQUENTIAL:
        return False
    return method.kind.cut == "whole" and method.kind.transport == "collective"


def fields_of(layer: ParallelLayer, direction: Pass, plan: Plan) -> dict[str, object]:
    """What a plan says about a pass of the layer, of what makes a difference there."""
    if direction == "forward":
        return {"forward": plan.forward}
    if not isinstance(plan, ColumnPlan):
        return {"dgrad": plan.dgrad}
    own: dict[str, object] = {"keeps": plan.keeps} if layer.gathers_again else {}
    own |= {"dgrad": plan.dgrad} if layer.has_dgrad else {}
    return own | ({"wgrad": plan.wgrad} if layer.gathers_again and plan.keeps == "shard" else {})


def layer_subject(
    kind: LayerKind,
    direction: Pass,
    probe: Probe,
    *,
    workload: Workload,
    parallel: ModelParallelConfig,
    plan_of: PlanOf | None,
) -> Subject:
    """One pass of a kind of layer."""
    layer = kind.layer
    ways = ways_of(layer, direction, parallel, with_pacing=probe.env.device.type == "cpu")
    variants: dict[str, Callable[[], float]] = {PRODUCTS: partial(probe.products_milliseconds, direction)}
    for name, plan in ways.communication.items():
        variants[name] = partial(probe.communication_milliseconds, direction, plan)
    for name, plan in ways.plans.items():
        variants[name] = partial(probe.milliseconds, direction, plan)
    chosen, methods = {}, {}
    own: dict[str, Plan] = {SWITCHES: layer.module.plan} | ({} if plan_of is None else {MEASURED: plan_of(layer)})
    for role, plan in own.items():
        fields = fields_of(layer, direction, plan)
        known = [n for n, other in ways.plans.items() if fields_of(layer, direction, other) == fields]
        chosen[role] = known[0] if known else role
        if not known:
            variants[role] = partial(probe.milliseconds, direction, plan)
            methods[role] = ", ".join(f"{site} {way}" for site, way in fields.items())
    return Subject(
        what="layer",
        name=kind.name,
        count=kind.count,
        direction=direction,
        message_bytes_per_rank=message_bytes(layer, direction, workload, size=parallel.tensor_parallel_size),
        variants=variants,
        communication=tuple(ways.communication),
        candidates=tuple(ways.plans),
        chosen=chosen,
        methods=methods,
    )


def message_bytes(layer: ParallelLayer, direction: Pass, workload: Workload, *, size: int) -> int:
    """What each rank sends in a pass of one layer."""
    if direction == "forward" or layer.kind == "row":
        num_messages = 1
    else:
        fields = fields_of(layer, direction, layer.module.plan)
        num_messages = ("dgrad" in fields) + ("wgrad" in fields)
    whole = workload.sequence * workload.batch * layer.width * BYTES_OF[workload.dtype]
    return num_messages * whole * (size - 1) // size


def layer_subjects(
    kinds: Sequence[LayerKind],
    env: GlobalEnv,
    *,
    workload: Workload,
    parallel: ModelParallelConfig,
    plan_of: PlanOf | None,
) -> Iterator[tuple[LayerKind, Pass, Subject]]:
    """All passes of all kinds of layers, one after the other: a layer takes memory only while it is measured."""
    for kind in kinds:
        probe = Probe(kind.layer, workload, env)
        for direction in kind.directions:
            subject = layer_subject(kind, direction, probe, workload=workload, parallel=parallel, plan_of=plan_of)
            yield kind, direction, subject


def with_pass(plan: Plan, direction: Pass, other: Plan) -> Plan:
    """The plan with what the other one does in a pass."""
    names = ("forward",) if direction == "forward" else ("dgrad", "wgrad")
    return with_fields(plan, {name: getattr(other, name) for name in names if hasattr(other, name)})
