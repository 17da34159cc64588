"""The parts of the model's blocks: attention, feed-forward layer or experts, and the whole block, with peers beside."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shiplap.dist import GlobalEnv
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.models.decoder import DecoderModel
from shiplap.overlap.plan import ColumnPlan
from shiplap.tools.bench.layers import LayerKind, PlanOf, message_bytes, ranges, ways_of, with_pass
from shiplap.tools.bench.peers import PEERS, seat
from shiplap.tools.bench.result import Result
from shiplap.tools.bench.subject import COMMUNICATION, FASTEST, MEASURED, PRODUCTS, SEQUENTIAL, SWITCHES, Subject
from shiplap.tuning.candidates import Pass, Plan, sequential_plan
from shiplap.tuning.measured import describe
from shiplap.tuning.parts import Part, Plans, block_parts
from shiplap.tuning.probe import Workload

Found = Sequence[tuple[LayerKind, Pass, Result]]
"""What was measured of the layers, which the parts consist of."""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that are as fast as one another.

    Attributes:
        number: of the first.
        count: of them.
        label: which they are, where there are others.
    """

    number: int
    count: int
    label: str


def block_kinds(model: DecoderModel) -> list[BlockKind]:
    """The kinds of blocks. They differ where adapters stand beside some of them only."""
    alike: list[tuple[object, list[int]]] = []
    for number in range(len(model.blocks)):
        description = [describe(layer) for layer in _layers_of(model, number)]
        known = next((numbers for other, numbers in alike if other == description), None)
        if known is None:
            alike.append((description, [number]))
        else:
            known.append(number)
    return [
        BlockKind(number=numbers[0], count=len(numbers), label=f" of block {ranges(numbers)}" if len(alike) > 1 else "")
        for _, numbers in alike
    ]


def _layers_of(model: DecoderModel, number: int) -> list[ParallelLayer]:
    return [layer for layer in parallel_layers(model) if layer.path.startswith(f"blocks.{number}.")]


def part_subjects(
    model: DecoderModel,
    env: GlobalEnv,
    *,
    workload: Workload,
    found: Found,
    plan_of: PlanOf | None,
    peers: Sequence[str],
) -> Iterator[Subject]:
    """All parts of all kinds of blocks, one after the other.

    Args:
        model: this rank's skeleton.
        env: this rank's place.
        workload: what it is run on.
        found: of all layers: which methods are the fastest, and which communication is.
        plan_of: the measured plan.
        peers: names of those that are measured too.
    """
    for kind in block_kinds(model):
        for part in block_parts(model, kind.number, workload, env).values():
            yield _subject(part, kind, found=found, plan_of=plan_of, peers=peers)


def _subject(part: Part, kind: BlockKind, *, found: Found, plan_of: PlanOf | None, peers: Sequence[str]) -> Subject:
    sequential = _sequential(part)
    communication = {COMMUNICATION + SEQUENTIAL: sequential, COMMUNICATION + FASTEST: _smallest(part, found)}
    plans: dict[str, Plans] = {
        SEQUENTIAL: sequential,
        SWITCHES: {name: layer.module.plan for name, layer in part.layers.items()},
    }
    if plan_of is not None:
        plans[MEASURED] = {name: plan_of(layer) for name, layer in part.layers.items()}
    plans[FASTEST] = _fastest(part, found)
    variants: dict[str, Callable[[], float]] = {PRODUCTS: part.products_milliseconds}
    communication = {
        name: own for name, own in communication.items() if own != sequential or name == COMMUNICATION + SEQUENTIAL
    }
    for name, own in communication.items():
        variants[name] = partial(part.communication_milliseconds, own)
    chosen: dict[str, str] = {}
    for role, own in plans.items():
        chosen[role] = next((name for name in chosen if plans[name] == own), role)
        if chosen[role] == role:
            variants[role] = partial(part.milliseconds, own)
    seated = {PEERS[name].title: seat(PEERS[name], part) for name in peers}
    why_not = {title: step for title, step in seated.items() if isinstance(step, str)}
    there = {title: step for title, step in seated.items() if not isinstance(step, str)}
    for title, step in there.items():
        variants[title] = partial(part.timed, title, step)
    size = part.env.layout.size("tp")
    return Subject(
        what="part",
        name=part.name + kind.label,
        count=kind.count,
        direction="forward+backward" if part.has_backward else "forward",
        message_bytes_per_rank=sum(
            part.num_forwards(layer) * message_bytes(layer, "forward", part.workload, size=size)
            + (message_bytes(layer, "backward", part.workload, size=size) if layer.has_backward else 0)
            for layer in part.layers.values()
        ),
        variants=variants,
        communication=tuple(communication),
        candidates=(SEQUENTIAL,),
        chosen={role: name for role, name in chosen.items() if role != SEQUENTIAL},
        methods={name: _in_words(plans[name]) for name in variants if name in plans},
        peers=tuple(there),
        why_not=why_not,
    )


def _sequential(part: Part) -> dict[str, Plan]:
    own = {name: layer.module.plan for name, layer in part.layers.items()}
    return {
        name: sequential_plan(layer, keeps=plan.keeps if isinstance(plan := own[name], ColumnPlan) else "shard")
        for name, layer in part.layers.items()
    }


def _smallest(part: Part, found: Found) -> Plans:
    """The plans whose communication is the smallest by itself."""
    plans = _sequential(part)
    for name, direction, result in _passes(part, found):
        ways = ways_of(part.layers[name], direction, part.env.config)
        plans[name] = with_pass(plans[name], direction, ways.communication[result.communication])
    return plans


def _fastest(part: Part, found: Found) -> Plans:
    """The plans that are the fastest for each layer by itself."""
    plans = _sequential(part)
    for name, direction, result in _passes(part, found):
        ways = ways_of(part.layers[name], direction, part.env.config)
        plans[name] = with_pass(plans[name], direction, ways.plans[result.fastest])
    return plans


def _passes(part: Part, found: Found) -> Iterator[tuple[str, Pass, Result]]:
    for name, layer in part.layers.items():
        description = describe(layer)
        for kind, direction, result in found:
            if kind.description == description:
                yield name, direction, result


def _in_words(plans: Mapping[str, Plan]) -> str:
    """Methods of forward, dgrad and wgrad of each layer."""
    return ", ".join(
        f"{name} {'/'.join(str(getattr(plan, site)) for site in ('forward', 'dgrad', 'wgrad') if hasattr(plan, site))}"
        for name, plan in plans.items()
    )
