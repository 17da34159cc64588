"""What times say that were measured in pairs: two ways of doing one thing, in the same rounds.

Times on shared machines are noisy, the more the shorter they are, and have long tails. So what is asked of them does
not depend on how noise is distributed, and one stall among several rounds changes little: ranks, and medians of means.
If noise is normal they need fewer rounds than signs and medians do.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, inf, log, sqrt
from statistics import NormalDist, median

Samples = Mapping[str, Sequence[float]]
"""Milliseconds of each way, a value a round; those that dropped out have fewer."""
DOUBT = 0.05
"""Probability that chance gives what is called clear."""
_MOST_EXACT = 30
"""Values: of more, a sum of ranks is nearly normal."""
ENOUGH_FOR_NOISE = 4
"""Ways: fewer say too little about the noise."""


def ratios(samples: Samples, name: str, to: str) -> list[float]:
    """Times of one way over those of another, of the rounds that both took part in."""
    return [a / b for a, b in zip(samples[name], samples[to], strict=False)]


def typical(factors: Sequence[float]) -> float:
    """Around which factors such as ratios lie: the median of the geometric means of all pairs of them.

    That is the estimate of Hodges and Lehmann (1963), of logarithms; each value is paired with itself, too.
    """
    logs = [log(factor) for factor in factors]
    return exp(median([0.5 * (one + other) for i, one in enumerate(logs) for other in logs[i:]]))


def clearly_above(factors: Sequence[float], bound: float, *, doubt: float = DOUBT) -> bool:
    """Whether factors are so often, and by so much, above a bound that chance does not explain it.

    A signed-rank test (Wilcoxon 1945) of their logarithms, but with ranks from n + 1 to 2 n, so that a stall counts at
    most twice as much as another round: between it and the sign test.

    Args:
        factors: such as the ratios of two ways' times.
        bound: a factor at it is not above it.
        doubt: the probability that factors which lie as much below the bound as above it give what is called clear.
    """
    distances = sorted((log(factor / bound) for factor in factors), key=lambda x: (abs(x), -x))
    number = len(distances)
    below = sum(number + rank for rank, distance in enumerate(distances, 1) if distance <= 0.0)
    return _probability_of(below, number) <= doubt


def _probability_of(total: int, number: int) -> float:
    """That so many fair coins, which count n + 1, n + 2 … 2 n, add up to so little or less."""
    if number <= _MOST_EXACT:
        return sum(_sets_by_sum(number)[: total + 1]) / (1 << number)
    values = range(number + 1, 2 * number + 1)
    return NormalDist(sum(values) / 2, sqrt(sum(value**2 for value in values)) / 2).cdf(total)


@cache
def _sets_by_sum(number: int) -> Sequence[int]:
    """How many sets of the numbers from n + 1 to 2 n have a sum of 0, 1, 2 and so on."""
    counts = [1]
    for value in range(number + 1, 2 * number + 1):
        none = [0] * value
        counts = [a + b for a, b in zip([*counts, *none], [*none, *counts], strict=True)]
    return counts


def noise_of(samples: Samples) -> float:
    """The standard deviation of the logarithm of a ratio of two times; infinite if there are too few to say.

    From what changed between one round and the next, of the ways that took part in both: half of the changes are
    smaller than 0.67 standard deviations, whatever the long tails.
    """
    changes: list[float] = []
    for number in range(1, max(map(len, samples.values()))):
        of_ways = [log(times[number] / times[number - 1]) for times in samples.values() if len(times) > number]
        if len(of_ways) >= ENOUGH_FOR_NOISE:
            changes += [abs(change - median(of_ways)) for change in of_ways]
    return median(changes) / 0.6745 if changes else inf
