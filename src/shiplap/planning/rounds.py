"""Which of several ways is the fastest: measured in turns, until the answer is clear.

All ways run once a round, one after the other, so that a machine whose speed drifts treats them alike; compared are
times of one round. A way that is clearly slower than the fastest drops out. The test is the sign test: how often one
was slower than the other, whatever by how much, since times on shared machines have long tails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

_DOUBT = 0.05
"""Probability that a fair coin gives what is called clear."""
_DOUBT_TO_STOP = 0.01
"""The same, to stop because of it. A race asks after every round: with 5 %, one of two equally fast and noisy ways was
called clearly faster in a third of simulated races of up to 200 rounds; with 1 % in a tenth, for three more rounds."""
_NOT_WORTH_IT = 1.01
"""What is faster by less than this is as good as the simpler way."""
_EARLY = {2: 1.4, 3: 1.25, 4: 1.15}
"""After so many rounds, too few for the test: how much slower in each of them is enough to drop out. Assumptions;
`benchmarks/tune.py` compares what comes of them with measuring everything."""

Samples = Mapping[str, Sequence[float]]
"""Milliseconds of each way, a value a round; those that dropped out have fewer."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way to go.

    Attributes:
        name: its name.
        is_clear: whether it is clearly faster than the first way, or the first way is it because no other is.
        speedup: of it against the first way: the median of the ratios of each round. 1 if it is the first way.
        num_rounds: that it was measured in.
    """

    name: str
    is_clear: bool
    speedup: float
    num_rounds: int


def clearly_above(values: Sequence[float], bound: float, *, doubt: float = _DOUBT) -> bool:
    """Whether so many of the values are above the bound that chance does not explain it."""
    below = sum(value <= bound for value in values)
    chances = sum(comb(len(values), k) for k in range(below + 1))
    return chances <= int(doubt * 2 ** len(values))


def ratios(samples: Samples, name: str, to: str) -> list[float]:
    """Times of one way over those of another, of the rounds that both took part in."""
    return [a / b for a, b in zip(samples[name], samples[to], strict=False)]


def is_out(samples: Samples, name: str, leader: str) -> bool:
    """Whether a way need not be measured again, as it is slower than the leader."""
    slower = ratios(samples, name, leader)
    if len(slower) in _EARLY:
        return min(slower) > _EARLY[len(slower)]
    return clearly_above(slower, 1.0) and median(slower) > _NOT_WORTH_IT


def leader_of(samples: Samples) -> str:
    """The way that is the fastest in the median, among those that took part in every round.

    Times count against what is usual in their round: else, on a machine whose speed drifts, a stall in one round would
    make another round the median.
    """
    num_rounds = max(map(len, samples.values()))
    times = {name: values for name, values in samples.items() if len(values) == num_rounds}
    usual = [median(of_round) for of_round in zip(*times.values(), strict=True)]
    return min(times, key=lambda name: median(time / typical for time, typical in zip(times[name], usual, strict=True)))


def is_decided(samples: Samples, running: Sequence[str]) -> bool:
    """Whether another round would not change which way to go, of those still running, the first of all among them."""
    leader, first = leader_of(samples), running[0]
    slower = ratios(samples, first, leader)
    is_first_out = clearly_above(slower, 1.0, doubt=_DOUBT_TO_STOP) and median(slower) > _NOT_WORTH_IT
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
        if len(times) == num_rounds and median(ratios(samples, name, leader)) < _NOT_WORTH_IT
    ]
    chosen = leader if first in alike else alike[0]
    gains = ratios(samples, first, chosen)
    is_enough = num_rounds > max(_EARLY)
    is_faster = is_enough and clearly_above(gains, 1.0) and median(gains) > _NOT_WORTH_IT
    if chosen == first or not is_faster:
        # Not clear if the fastest might well be worth it, or others, and there were too few rounds to see it.
        is_alone = all(name == first or len(times) < num_rounds for name, times in samples.items())
        is_clear = is_alone or (is_enough and (first in alike or median(gains) <= _NOT_WORTH_IT))
        return Choice(name=first, is_clear=is_clear, speedup=1.0, num_rounds=num_rounds)
    return Choice(name=chosen, is_clear=True, speedup=median(gains), num_rounds=num_rounds)


def race(
    names: Sequence[str],
    measure: Callable[[str], float],
    *,
    most_rounds: int,
    go_on: Callable[[], bool],
    drops: bool = True,
) -> dict[str, list[float]]:
    """Measure until it is decided which is the fastest.

    The first way is never dropped: it is what the others are compared with.

    Args:
        names: of the ways, the simplest first.
        measure: runs one of them and returns milliseconds that all ranks agree on, so that all decide alike.
        most_rounds: after which it ends in any case.
        go_on: asked before each round but the first; all ranks must answer alike.
        drops: whether what is slower than the fastest drops out, and the race ends when it is decided.

    Returns:
        Milliseconds of each, a value a round.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    running = list(names)
    for number in range(most_rounds):
        if number > 0 and not go_on():
            break
        start = number % len(running)
        for name in running[start:] + running[:start]:
            samples[name].append(measure(name))
        if not drops:
            continue
        leader = leader_of(samples)
        running = [name for name in running if name in (names[0], leader) or not is_out(samples, name, leader)]
        if number >= max(_EARLY) and is_decided(samples, running):
            break
    return samples
