"""Which of several ways is the fastest: measured in turns, until the answer is clear.

All ways run once a round, one after the other, so that a machine whose speed drifts treats them alike; compared are
times of one round (`shiplap.tuning.statistics`). A way that is clearly slower than the fastest drops out: by the ranks
of what it was slower by, or by how much that typically is, against the noise that all ways together show.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import median

from shiplap.tuning.statistics import Samples, clearly_above, noise_of, ratios, typical

_DOUBT_OF_SLOW = 0.02
"""Probability that chance drops a way out in one of the rounds. With 5 %, five rounds in which another way was lucky
are enough, and the best way was lost too often (docs/experiments.md)."""
_DOUBT_OF_MANY = 0.01
_DOUBT_OF_ROUNDS = 0.005
"""Probability that chance makes one of many ways clearly the fastest, and that it ends the race when a round is over.
With 5 %, one of two equally fast and noisy ways was called that in a third of simulated races of up to 200 rounds, and
one of 17 after 5 rounds in an eighth of them; so it is in about a tenth or fewer."""
_NOT_WORTH_IT = 1.01
"""What is faster by less than this is as good as the simpler way."""
_EARLY = {2: 2.0, 3: 1.5, 4: 1.2}
_MARGIN = 1.05
"""After so many rounds, too few for the test, a way drops out that was slower by this margin in each of them, and by so
many times the noise besides. If noise is normal, each look is wrong about a way that is as fast in 1 of 1000 cases or
fewer."""
_SURE = 4.0
"""After more rounds it is enough that it is typically slower by so many times the noise over the root of the number of
rounds, about so many standard errors. With a stall among six rounds their signs and ranks would say nothing."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way to go.

    Attributes:
        name: its name.
        is_clear: whether it is clearly faster than the first way, or the first way is it because no other is.
        speedup: of it against the first way: the typical ratio of a round. 1 if it is the first way.
        num_rounds: that it was measured in.
    """

    name: str
    is_clear: bool
    speedup: float
    num_rounds: int


def is_out(samples: Samples, name: str, leader: str, *, noise: float, doubt: float = _DOUBT_OF_SLOW) -> bool:
    """Whether a way is clearly slower than the leader."""
    slower = ratios(samples, name, leader)
    number = len(slower)
    if number <= max(_EARLY):
        return number in _EARLY and log(min(slower) / _MARGIN) > _EARLY[number] * noise
    by = typical(slower) / _NOT_WORTH_IT
    return by > 1.0 and (clearly_above(slower, 1.0, doubt=doubt) or log(by) > _SURE * noise / sqrt(number))


def by_speed(samples: Samples) -> list[str]:
    """The ways that took part in every round, the fastest first.

    Times count against what is usual in their round: else, on a machine whose speed drifts, a stall in one round would
    make another round the typical one.
    """
    times = _of_all_rounds(samples)
    usual = [median(of_round) for of_round in zip(*times.values(), strict=True)]
    return sorted(
        times, key=lambda name: typical([time / middle for time, middle in zip(times[name], usual, strict=True)])
    )


def _of_all_rounds(samples: Samples) -> Samples:
    """Of the ways that took part in all of them."""
    num_rounds = max(map(len, samples.values()))
    return {name: values for name, values in samples.items() if len(values) == num_rounds}


def leader_of(samples: Samples) -> str:
    """The fastest of those that took part in every round."""
    return by_speed(samples)[0]


def is_decided(samples: Samples, running: Sequence[str]) -> bool:
    """Whether another round would not change which way to go, of those still running, the first of all among them."""
    leader, first = leader_of(samples), running[0]
    slower = ratios(samples, first, leader)
    is_first_out = clearly_above(slower, 1.0, doubt=_DOUBT_OF_ROUNDS) and typical(slower) > _NOT_WORTH_IT
    return all(
        (name == first and is_first_out) or clearly_above(ratios(samples, leader, name), 1 / _NOT_WORTH_IT)
        for name in running
        if name != leader
    )


def choose(samples: Samples) -> Choice:
    """The fastest way; of those as good as it the first one. The first of all, unless another is clearly faster."""
    first = next(iter(samples))
    leader = leader_of(samples)
    num_rounds = len(samples[leader])
    alike = [
        name
        for name, times in samples.items()
        if len(times) == num_rounds and typical(ratios(samples, name, leader)) < _NOT_WORTH_IT
    ]
    chosen = leader if first in alike else alike[0]
    gains = ratios(samples, first, chosen)
    is_enough = num_rounds > max(_EARLY)
    if chosen == first or not is_out(samples, first, chosen, noise=noise_of(samples), doubt=_DOUBT_OF_MANY):
        # Not clear if the fastest might well be worth it, or others, and there were too few rounds to see it.
        is_alone = all(name == first or len(times) < num_rounds for name, times in samples.items())
        is_clear = is_alone or (is_enough and (first in alike or typical(gains) <= _NOT_WORTH_IT))
        return Choice(name=first, is_clear=is_clear, speedup=1.0, num_rounds=num_rounds)
    return Choice(name=chosen, is_clear=True, speedup=typical(gains), num_rounds=num_rounds)


@dataclass(kw_only=True, eq=False)
class Race:
    """Ways of doing one thing, which run in turns until it is decided which is the fastest.

    The first way is never dropped: it is what the others are compared with.

    Attributes:
        names: of the ways, the simplest first.
        measure: runs one of them and returns milliseconds that all ranks agree on, so that all decide alike.
        most_rounds: after which it is over in any case.
        drops: whether what is slower than the fastest drops out, and the race ends when it is decided.
        samples: milliseconds of each, a value a round.
        num_rounds: that were run.
        seconds: that they took on this rank.
        seconds_of_next_round: about, after the first one.
        is_cut_short: whether ways were left out that are not clearly slower.
    """

    names: Sequence[str]
    measure: Callable[[str], float]
    most_rounds: int
    drops: bool = True
    samples: dict[str, list[float]] = field(init=False)
    num_rounds: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)
    seconds_of_next_round: float = field(init=False, default=0.0)
    is_cut_short: bool = False

    def __post_init__(self) -> None:
        """At the start."""
        self.samples = {name: [] for name in self.names}
        self._running = list(self.names)
        self._is_decided = False

    @property
    def is_over(self) -> bool:
        """Whether another round would change nothing, or is not wanted."""
        return self._is_decided or self.num_rounds >= self.most_rounds

    @property
    def num_running(self) -> int:
        """How many ways have not dropped out."""
        return len(self._running)

    def keep(self, number: int) -> None:
        """Only so many of the fastest, and the first; for want of time.

        That fewer and fewer run more and more often is successive halving (Jamieson and Talwalkar 2016).
        """
        if number < self.num_running:
            fastest = [name for name in by_speed(self.samples) if name != self.names[0]][: number - 1]
            self._running = [name for name in self._running if name == self.names[0] or name in fastest]
            self.is_cut_short = True

    def run_round(self) -> None:
        """Measure what still runs once, each time beginning with another one."""
        running, begun = self._running, time.perf_counter()
        start = self.num_rounds % len(running)
        for name in running[start:] + running[:start]:
            self.samples[name].append(self.measure(name))
        seconds = time.perf_counter() - begun
        self.num_rounds += 1
        self.seconds += seconds
        if self.drops:
            first, leader, noise = self.names[0], leader_of(self.samples), noise_of(self.samples)
            self._running = [
                name
                for name in running
                if name in (first, leader) or not is_out(self.samples, name, leader, noise=noise)
            ]
            self._is_decided = self.num_rounds > max(_EARLY) and is_decided(self.samples, self._running)
        self.seconds_of_next_round = seconds * self.num_running / len(running)


def run_in_turns(
    races: Iterable[Race],
    go_on: Callable[[Race], bool] = lambda race: True,
    after_turn: Callable[[Sequence[Race]], None] = lambda races: None,
) -> None:
    """Run a round of each race, again and again, until all are over.

    So each of them lasts as long as all together: a machine may be otherwise for seconds, which would be the whole of a
    race that ran alone.

    Args:
        races: each is run one round at least.
        go_on: asked before each other round of a race; all ranks must answer alike.
        after_turn: is given those that are not over after each turn.
    """
    running = list(races)
    while running:
        for race in tuple(running):
            if race.num_rounds > 0 and not go_on(race):
                running.remove(race)
            else:
                race.run_round()
        running = [race for race in running if not race.is_over]
        after_turn(running)
