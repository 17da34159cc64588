"""Which way of one pass of one kind of layer is the fastest: its races, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from shiplap.inspection.sites import folded_path
from shiplap.overlap.plan import Keeps
from shiplap.tuning.candidates import Pass, Plan
from shiplap.tuning.kinds import LayerKind
from shiplap.tuning.measured import Kept, MeasuredPass, Timing
from shiplap.tuning.probe import Probe
from shiplap.tuning.race import Choice, Race, by_speed, choose
from shiplap.tuning.statistics import clearly_above, ratios, typical

_KEEPS: tuple[Keeps, ...] = ("shard", "gathered")


@dataclass(frozen=True, kw_only=True)
class Ways:
    """In which one kind of layer could do a pass, with one kind of input kept for wgrad.

    Attributes:
        kind: of layer.
        probe: the layer.
        direction: the pass.
        keeps: what a Column layer keeps.
        plans: by name, the one without overlap first.
    """

    kind: LayerKind
    probe: Probe
    direction: Pass
    keeps: Keeps
    plans: dict[str, Plan]

    def race(self, names: Sequence[str], *, most_rounds: int, drops: bool = True) -> Race:
        """Between some of them."""
        return Race(
            names=names,
            measure=self._milliseconds,
            most_rounds=most_rounds,
            drops=drops,
            is_cut_short=len(names) < len(self.plans),
        )

    def seconds_of_a_round(self) -> float:
        """About, if all take part in it."""
        return len(self.plans) * self.probe.seconds_of_a_measurement(self.direction, next(iter(self.plans.values())))

    def _milliseconds(self, name: str) -> float:
        return self.probe.milliseconds(self.direction, self.plans[name])


@dataclass(kw_only=True, eq=False)
class Contest:
    """The race between the ways of a pass, and what may have to follow it.

    Attributes:
        ways: of the pass.
        race: between those that there is time for.
        duel: the fastest alone against none.
        other: the same pass with the other kind of input kept, if the two are compared.
        final: between the best of either.
    """

    ways: Ways
    race: Race
    duel: Race | None = None
    other: "Contest | None" = None
    final: Race | None = None

    @property
    def choice(self) -> Choice:
        """Of all that this kind of input can have."""
        return choose((self.race if self.duel is None else self.duel).samples)

    def prepare_duel(self, *, most_rounds: int) -> Race | None:
        """If none was chosen, and the fastest of the others is not clearly slower."""
        samples, first = self.race.samples, self.race.names[0]
        others = [name for name in by_speed(samples) if name != first]
        if others and self.choice.name == first and not clearly_above(ratios(samples, others[0], first), 1.0):
            self.duel = self.ways.race([first, others[0]], most_rounds=most_rounds)
        return self.duel

    def prepare_final(self, *, most_rounds: int) -> Race | None:
        """If there is the other kind of input."""
        if self.other is not None:
            plans = {one.ways.keeps: one.ways.plans[one.choice.name] for one in (self, self.other)}
            ways = replace(self.ways, plans={keeps: plans[keeps] for keeps in _KEEPS})
            self.final = ways.race(_KEEPS, most_rounds=most_rounds)
        return self.final

    def result(self, *, more_bytes: int, takes_kept: bool) -> MeasuredPass:
        """What was found.

        Args:
            more_bytes: that the gathered input has, and its shard does not.
            takes_kept: whether the gathered input is kept where that is clearly faster.
        """
        own = self._own_result()
        if self.other is None or self.final is None:
            return own
        theirs, samples = self.other._own_result(), self.final.samples
        gathered = own if self.ways.keeps == "gathered" else theirs
        choice = choose(samples)
        kept = Kept(
            method=gathered.method,
            speedup=typical(ratios(samples, "shard", "gathered")),
            is_clear=choice.is_clear,
            memory_bytes=more_bytes,
        )
        is_taken = takes_kept and gathered is theirs and choice.name == "gathered"
        return replace(theirs if is_taken else own, kept=kept)

    def _own_result(self) -> MeasuredPass:
        ways, choice, samples = self.ways, self.choice, self.race.samples
        first, plan = self.race.names[0], ways.plans[choice.name]
        fields = (ways.direction,) if ways.direction == "forward" else ("dgrad", "wgrad", "keeps")
        return MeasuredPass(
            layers=list(dict.fromkeys(folded_path(path)[0] for path in ways.kind.paths)),
            layer=ways.kind.description,
            direction=ways.direction,
            method=choice.name,
            fields={name: str(getattr(plan, name)) for name in fields if hasattr(plan, name)},
            # What there was no time for could be faster than no overlap.
            is_clear=choice.is_clear and (choice.name != first or not self.race.is_cut_short),
            speedup=choice.speedup,
            timings={
                name: Timing(median_ms=median(times), rounds=len(times), speedup=typical(ratios(samples, first, name)))
                for name, times in samples.items()
            },
        )
