"""Measures which way of every pass of every kind of layer is the fastest, and whether anything is faster than none."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median

from shiplap.comm.plan import Keeps
from shiplap.config import ModelParallelConfig
from shiplap.planning.candidates import Pass, Plan, candidates
from shiplap.planning.layers import ParallelLayer
from shiplap.planning.measured import Conditions, Description, Kept, MeasuredPass, MeasuredPlan, Timing, describe
from shiplap.planning.probe import Probe, slowest_rank
from shiplap.planning.rounds import Samples, choose, leader_of, race, ratios
from shiplap.planning.sites import folded_path
from shiplap.topology import GlobalEnv

_ROUNDS = 20
_SHORT_SECONDS = 2.0
_MOST_ROUNDS = 200
"""What is not clear after 20 rounds is given up, unless that took less than two seconds: short passes are the noisiest,
and more of them cost little."""
_ROUNDS_OF_TWO = 60
"""If it is not clear then whether the fastest is faster than none, the two are measured alone, in so many rounds."""
_LEAST_ROUNDS = 6
"""With fewer nothing is clear; if there is no time for so many, fewer ways are measured."""
_KEEPS: tuple[Keeps, ...] = ("shard", "gathered")
_BYTES_OF = {"float32": 4, "bfloat16": 2}

Progress = Callable[[float, str], None]
"""Is told what part of the work is done, and what comes next."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """How plans are measured.

    Attributes:
        seconds: at most; None: until everything is clear, or it takes too long.
        compares_kept: also measure what keeping the gathered input of Column layers would change.
        takes_kept: and keep it where that is clearly faster.
        is_exhaustive: measure every way in all rounds, so that none drops out.
    """

    seconds: float | None = None
    compares_kept: bool = False
    takes_kept: bool = False
    is_exhaustive: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are as fast as one another.

    Attributes:
        description: what they have in common.
        layer: the first of them.
        paths: of all.
    """

    description: Description
    layer: ParallelLayer
    paths: list[str]

    @property
    def directions(self) -> tuple[Pass, ...]:
        """The passes in which they communicate."""
        return ("forward", "backward") if self.layer.has_backward else ("forward",)


def kinds_of(layers: Iterable[ParallelLayer]) -> list[LayerKind]:
    """The kinds of layers, in their order."""
    kinds: list[LayerKind] = []
    for layer in layers:
        description = describe(layer)
        known = next((kind for kind in kinds if kind.description == description), None)
        if known is None:
            kinds.append(LayerKind(description=description, layer=layer, paths=[layer.path]))
        else:
            known.paths.append(layer.path)
    return kinds


@dataclass(kw_only=True)
class _Clock:
    """How much of the time is left; the same on all ranks."""

    seconds: float | None
    env: GlobalEnv
    begun: float = field(default_factory=time.perf_counter)

    def left(self) -> float | None:
        """Seconds."""
        if self.seconds is None:
            return None
        return self.seconds - slowest_rank(time.perf_counter() - self.begun, self.env)


def tune(
    layers: Iterable[ParallelLayer],
    parallel: ModelParallelConfig,
    *,
    conditions: Conditions,
    env: GlobalEnv,
    settings: TuneSettings,
    progress: Progress,
) -> MeasuredPlan:
    """Measure on all ranks of the job, which must call this together; they all find the same.

    Args:
        layers: of this rank's shard of a model without memory (`shiplap.planning.skeleton`).
        parallel: switches: what they do not let overlap is not measured.
        conditions: what it is for.
        env: this rank's place.
        settings: how.
        progress: is told how far it is.
    """
    kinds = kinds_of(layers)
    clock = _Clock(seconds=settings.seconds, env=env)
    num_passes, done = sum(len(kind.directions) for kind in kinds), 0
    passes: list[MeasuredPass] = []
    for kind in kinds:
        progress(done / num_passes, kind.paths[0])
        probe = Probe(kind.layer, conditions.workload, env)
        tuner = _Tuner(kind=kind, probe=probe, parallel=parallel, conditions=conditions, settings=settings)
        for direction in kind.directions:
            left = clock.left()
            tuner.seconds = None if left is None else left / (num_passes - done)
            passes.append(tuner.best(direction))
            done += 1
            progress(done / num_passes, f"{kind.paths[0]} {direction}: {passes[-1].method}")
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredPlan(source="this plan", made=made, conditions=conditions, passes=passes)


@dataclass(kw_only=True)
class _Tuner:
    """Finds the best for one kind of layer."""

    kind: LayerKind
    probe: Probe
    parallel: ModelParallelConfig
    conditions: Conditions
    settings: TuneSettings
    seconds: float | None = None

    def best(self, direction: Pass) -> MeasuredPass:
        """The fastest way of a pass."""
        asked: Keeps = "gathered" if self.parallel.tp_comm_keep_gathered else "shard"
        compares = direction == "backward" and self.settings.compares_kept and self.kind.layer.gathers_again
        if compares and self.seconds is not None:
            # This one, the other one, and the best of both against each other.
            self.seconds /= 3
        found = self._race(direction, keeps=asked)
        if not compares:
            return found
        return self._compare_kept(direction, found, asked)

    def _race(self, direction: Pass, *, keeps: Keeps) -> MeasuredPass:
        plans = candidates(self.kind.layer, direction, self.parallel, keeps=keeps)
        samples = self._measure(direction, plans)
        first, fastest = next(iter(plans)), leader_of(samples)
        choice = choose(samples)
        if not choice.is_clear and self.seconds is None and not self.settings.is_exhaustive:
            choice = choose(
                race(
                    [first, fastest],
                    lambda name: self.probe.milliseconds(direction, plans[name]),
                    most_rounds=_ROUNDS_OF_TWO,
                    go_on=lambda: True,
                )
            )
        plan = plans[choice.name]
        names = (direction,) if direction == "forward" else ("dgrad", "wgrad", "keeps")
        return MeasuredPass(
            layers=list(dict.fromkeys(folded_path(path)[0] for path in self.kind.paths)),
            layer=self.kind.description,
            direction=direction,
            method=choice.name,
            fields={name: getattr(plan, name) for name in names if hasattr(plan, name)},
            # What there was no time for could be faster than no overlap.
            is_clear=choice.is_clear and (choice.name != first or len(samples) == len(plans)),
            speedup=choice.speedup,
            timings={
                name: Timing(median_ms=median(times), rounds=len(times), speedup=median(ratios(samples, first, name)))
                for name, times in samples.items()
                if times
            },
        )

    def _compare_kept(self, direction: Pass, found: MeasuredPass, asked: Keeps) -> MeasuredPass:
        """Also measure with the other kind of input kept, and the best of both against each other."""
        other: Keeps = "shard" if asked == "gathered" else "gathered"
        theirs = self._race(direction, keeps=other)
        best = {asked: found, other: theirs}
        plans: dict[str, Plan] = {
            keeps: candidates(self.kind.layer, direction, self.parallel, keeps=keeps)[best[keeps].method]
            for keeps in _KEEPS
        }
        samples = self._measure(direction, plans)
        choice = choose(samples)
        data = self.conditions
        shard = data.sequence * data.batch * self.kind.layer.width * _BYTES_OF[data.dtype] // data.tensor_parallel
        kept = Kept(
            method=best["gathered"].method,
            speedup=median(ratios(samples, "shard", "gathered")),
            is_clear=choice.is_clear,
            memory_bytes=shard * (data.tensor_parallel - 1),
        )
        takes = self.settings.takes_kept and asked == "shard" and choice.name == "gathered"
        return replace(theirs if takes else found, kept=kept)

    def _measure(self, direction: Pass, plans: dict[str, Plan]) -> Samples:
        begun, names, seconds = time.perf_counter(), list(plans), self.seconds
        num_rounds = 0

        def go_on() -> bool:
            nonlocal num_rounds
            num_rounds += 1
            spent = slowest_rank(time.perf_counter() - begun, self.probe.env)
            if seconds is not None and spent > seconds:
                return False
            return num_rounds < _ROUNDS or (spent < _SHORT_SECONDS and not self.settings.is_exhaustive)

        if seconds is not None and len(names) > 1:
            once = self.probe.seconds_of_a_measurement(direction, plans[names[0]])
            names = names[: int(max(2, min(seconds / max(once * _LEAST_ROUNDS, 1e-6), len(names))))]
        return race(
            names,
            lambda name: self.probe.milliseconds(direction, plans[name]),
            most_rounds=_MOST_ROUNDS if len(names) > 1 else _LEAST_ROUNDS,
            go_on=go_on,
            drops=not self.settings.is_exhaustive,
        )


def unclear(passes: Sequence[MeasuredPass]) -> list[str]:
    """The passes of which more measuring could say more, in words."""
    return [f"{' '.join(one.layers)} {one.direction}" for one in passes if not one.is_clear]
