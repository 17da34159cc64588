"""Measures which way of every pass of every kind of layer is the fastest, and whether anything is faster than none.

All passes are measured in turns, a round of each: the machine may be otherwise for seconds, which would be the whole of
a race that ran alone.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from shiplap.config import ModelParallelConfig
from shiplap.dist import GlobalEnv
from shiplap.inspection.layers import ParallelLayer
from shiplap.inspection.sites import BYTES_OF
from shiplap.overlap.plan import Keeps
from shiplap.tuning.candidates import Pass, Plan, candidates
from shiplap.tuning.contest import Contest, Ways
from shiplap.tuning.kinds import LayerKind, kinds_of
from shiplap.tuning.measured import Conditions, MeasuredPass, MeasuredPlan
from shiplap.tuning.probe import Probe, slowest_rank
from shiplap.tuning.race import Race, run_in_turns
from shiplap.tuning.statistics import ENOUGH_FOR_NOISE

_ROUNDS = 20
_SECONDS = 5.0
_MOST_ROUNDS = 200
"""What is not clear after 20 rounds is given up, unless that took less than five seconds: short passes are the
noisiest, and more of them cost little."""
_ROUNDS_OF_TWO, _SECONDS_OF_TWO = 60, 2.0
"""If the fastest is not clearly faster than none, nor slower, the two are measured alone, in so many rounds or more."""
_EXHAUSTIVE_ROUNDS = 60
_LEAST_ROUNDS = 6
"""With fewer little is clear; if there is no time for so many, only the fastest go on, as few as tell how noisy it
is."""
_FIRST_ROUND = 2.0
"""How much longer than others the first round takes: it also learns how often to run what takes little time."""
_RACES, _OTHERS, _DUELS, _FINALS = 0.6, 0.8, 0.9, 1.0
"""What part of the work is done at the end of each; of the time, too, if that is limited and the other kind of input is
compared: first what the plan is made of."""

Progress = Callable[[float, str], None]
"""Is told what part of the work is done, and what is being done."""


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
        layers: of this rank's shard of a model without memory (`shiplap.inspection.meta_model`).
        parallel: switches: what they do not let overlap is not measured.
        conditions: what it is for.
        env: this rank's place.
        settings: how.
        progress: is told how far it is.
    """
    tuner = _Tuner(
        kinds=kinds_of(layers),
        parallel=parallel,
        conditions=conditions,
        env=env,
        settings=settings,
        progress=progress,
        begun=time.perf_counter(),
    )
    passes = tuner.passes()
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredPlan(source="this plan", made=made, conditions=conditions, passes=passes)


@dataclass(frozen=True, kw_only=True)
class _Tuner:
    """Finds the fastest way of every pass of some kinds of layers."""

    kinds: Sequence[LayerKind]
    parallel: ModelParallelConfig
    conditions: Conditions
    env: GlobalEnv
    settings: TuneSettings
    progress: Progress
    begun: float

    def passes(self) -> list[MeasuredPass]:
        """Of each kind, in their order."""
        self.progress(0.0, "making the layers")
        contests = self._contests()
        others = [one.other for one in contests if one.other is not None]
        rounds = _EXHAUSTIVE_ROUNDS if self.settings.is_exhaustive else _ROUNDS
        limits = (_RACES, _OTHERS) if others else (1.0, 1.0)
        self._run([one.race for one in contests], 0.0, _RACES, rounds=rounds, until=limits[0])
        self._run([one.race for one in others], _RACES, _OTHERS, rounds=rounds, until=limits[1])
        if self.settings.seconds is None and not self.settings.is_exhaustive:
            made = (one.prepare_duel(most_rounds=_MOST_ROUNDS) for one in (*contests, *others))
            duels = [duel for duel in made if duel is not None]
            self._run(duels, _OTHERS, _DUELS, rounds=_ROUNDS_OF_TWO, seconds=_SECONDS_OF_TWO)
        made = (one.prepare_final(most_rounds=_MOST_ROUNDS) for one in contests)
        finals = [final for final in made if final is not None]
        self._run(finals, _DUELS, _FINALS, seconds=_SECONDS_OF_TWO)
        self.progress(1.0, "done")
        return [self._result(one) for one in contests]

    def _contests(self) -> list[Contest]:
        passes: list[list[Ways]] = []
        for kind in self.kinds:
            probe = Probe(kind.layer, self.conditions.workload, self.env)
            for direction in kind.directions:
                passes.append(
                    [
                        Ways(kind=kind, probe=probe, direction=direction, keeps=keeps, plans=plans)
                        for keeps in self._kept(kind, direction)
                        for plans in [self._plans(kind, direction, keeps)]
                    ]
                )
        share = self._affordable([ways for of_pass in passes for ways in of_pass])
        contests = []
        for of_pass in passes:
            contest, *others = (self._contest(ways, share) for ways in of_pass)
            contest.other = others[0] if others else None
            contests.append(contest)
        return contests

    def _plans(self, kind: LayerKind, direction: Pass, keeps: Keeps) -> dict[str, Plan]:
        is_gloo = self.env.device.type == "cpu"
        return candidates(kind.layer, direction, self.parallel, keeps=keeps, with_pacing=is_gloo)

    def _kept(self, kind: LayerKind, direction: Pass) -> Sequence[Keeps]:
        """What inputs are measured: the one that is asked for first."""
        asked: Keeps = "gathered" if self.parallel.tp_comm_keep_gathered else "shard"
        other: Keeps = "shard" if asked == "gathered" else "gathered"
        compares = self.settings.compares_kept and direction == "backward" and kind.layer.gathers_again
        return (asked, other) if compares else (asked,)

    def _affordable(self, everything: Sequence[Ways]) -> float:
        """The share of the ways for which there is time for a first round, in half of the time."""
        if self.settings.seconds is None:
            return 1.0
        round_s = sum(ways.seconds_of_a_round() for ways in everything)
        return min(1.0, 0.5 * self.settings.seconds / max(_FIRST_ROUND * round_s, 1e-6))

    def _contest(self, ways: Ways, share: float) -> Contest:
        names = list(ways.plans)[: max(2, int(share * len(ways.plans)))]
        rounds = _EXHAUSTIVE_ROUNDS if self.settings.is_exhaustive else _MOST_ROUNDS
        rounds = rounds if len(names) > 1 else _LEAST_ROUNDS
        return Contest(ways=ways, race=ways.race(names, most_rounds=rounds, drops=not self.settings.is_exhaustive))

    def _run(
        self,
        races: Sequence[Race],
        start: float,
        end: float,
        *,
        rounds: int = _ROUNDS,
        seconds: float = _SECONDS,
        until: float = 1.0,
    ) -> None:
        """Run races in turns, as the work from `start` to `end`.

        Each is given up after so many rounds and seconds, and all when this part of the time is over.
        """

        def go_on(race: Race) -> bool:
            spent = slowest_rank(time.perf_counter() - self.begun, self.env)
            of_race = slowest_rank(race.seconds, self.env)
            done = [1.0 if one.is_over else _share_done(one, rounds, seconds) for one in races]
            self.progress(
                start + (end - start) * sum(done) / len(done),
                f"round {race.num_rounds + 1}, {sum(not one.is_over for one in races)} of {len(races)} races open",
            )
            if self.settings.seconds is not None and spent > until * self.settings.seconds:
                return False
            return race.num_rounds < rounds or of_race < seconds

        def narrow(running: Sequence[Race]) -> None:
            if self.settings.seconds is None:
                return
            early = [race for race in running if race.num_rounds < _LEAST_ROUNDS]
            left = until * self.settings.seconds - slowest_rank(time.perf_counter() - self.begun, self.env)
            turn = slowest_rank(sum(race.seconds_of_next_round for race in running), self.env)
            for race in early:
                turns = (_LEAST_ROUNDS - race.num_rounds) / (_FIRST_ROUND if race.num_rounds == 1 else 1.0)
                if turn * turns > left:
                    race.keep(max(ENOUGH_FOR_NOISE, int(race.num_running * left / (turn * turns))))

        run_in_turns(races, go_on, narrow)

    def _result(self, contest: Contest) -> MeasuredPass:
        data, layer = self.conditions, contest.ways.kind.layer
        shard_bytes = data.sequence * data.batch * layer.width * BYTES_OF[data.dtype] // data.tensor_parallel
        return contest.result(
            more_bytes=shard_bytes * (data.tensor_parallel - 1),
            takes_kept=self.settings.takes_kept,
        )


def _share_done(race: Race, rounds: int, seconds: float) -> float:
    """Of a race that may end once both are over."""
    return min(race.num_rounds / rounds, race.seconds / seconds, 1.0)


def unclear(passes: Sequence[MeasuredPass]) -> list[str]:
    """The passes of which more measuring could say more, in words."""
    return [f"{' '.join(one.layers)} {one.direction}" for one in passes if not one.is_clear]
