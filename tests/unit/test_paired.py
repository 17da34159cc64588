"""What paired times say: against all outcomes of few coins, and simulated noise."""

from collections.abc import Sequence
from itertools import product
from math import exp, inf, log
from random import Random
from statistics import median, pvariance

import pytest

from shiplap.tuning.statistics import clearly_above, noise_of, ratios, typical


def normal(random: Random, middle: float, number: int) -> list[float]:
    return [middle * exp(random.gauss(0.0, 0.3)) for _ in range(number)]


@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize("doubt", [0.01, 0.05, 0.3])
def test_chance_is_called_clear_as_seldom_as_asked_for(number: int, doubt: float) -> None:
    """All signs that so many distances can have: each is as likely as another if there is nothing to be seen."""
    outcomes = [
        [exp(0.1 * rank * sign) for rank, sign in enumerate(signs, 1)] for signs in product((-1, 1), repeat=number)
    ]
    clear = sum(clearly_above(outcome, 1.0, doubt=doubt) for outcome in outcomes)
    assert clear <= doubt * len(outcomes)
    # The next larger sum would be too likely: if there are outcomes enough, over half of the doubt is made use of.
    assert clear > 0.5 * doubt * len(outcomes) or doubt < 2 * 0.5**number


def test_what_is_at_the_bound_is_not_above_it() -> None:
    assert not clearly_above([1.01] * 20, 1.01)
    assert clearly_above([1.02] * 5, 1.01)
    assert not clearly_above([], 1.0)


@pytest.mark.parametrize(
    ("num_above", "num_below", "is_clear"),
    [(4, 0, False), (5, 0, True), (6, 1, False), (7, 1, True), (10, 3, False), (17, 4, True)],
)
def test_stalls_do_not_hide_what_most_rounds_say(num_above: int, num_below: int, is_clear: bool) -> None:
    """Below by far more than ever above; all are as far above, the last of them counting most."""
    assert clearly_above([1.1] * num_above + [0.1] * num_below, 1.0) == is_clear


def test_of_equally_far_ones_those_below_count_more() -> None:
    """As much below as above in 6 of 20 rounds: then these are the ones that count most."""
    assert not clearly_above([2.0] * 14 + [0.5] * 6, 1.0)
    assert clearly_above([2.0] * 14 + [0.51] * 6, 1.0)


def test_with_many_rounds_chance_is_clear_as_seldom() -> None:
    """Of 31 and more values the sum is taken as normal."""
    random = Random(0)
    for number in (20, 30, 31, 60):
        clear = sum(clearly_above(normal(random, 1.0, number), 1.0) for _ in range(2000))
        assert clear / 2000 == pytest.approx(0.05, abs=0.015), number


def test_noise_that_is_normal_needs_fewer_rounds_than_their_signs_do() -> None:
    """A gain of 15 % in noise of 30 %, 20 rounds: signs alone (15 of 20 at 5 %) see it less often."""
    random = Random(0)
    races = [normal(random, 1.15, 20) for _ in range(400)]
    found = sum(clearly_above(race, 1.0) for race in races)
    by_signs = sum(sum(value > 1.0 for value in race) >= 15 for race in races)
    assert found > 1.1 * by_signs


def test_what_is_typical_is_surer_than_the_median() -> None:
    random = Random(0)
    races = [normal(random, 1.0, 20) for _ in range(400)]
    assert pvariance(log(typical(race)) for race in races) < 0.8 * pvariance(log(median(race)) for race in races)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([2.0], 2.0),
        ([1.0, 4.0], 2.0),
        ([1.0, 4.0, 16.0], 4.0),
        # All pairs: 1, 1.41, 2, 11.3, 16, 128; the middle of the two in the middle.
        ([1.0, 2.0, 128.0], 2**2.25),
        ([1.0] * 9 + [100.0], 1.0),
    ],
)
def test_what_is_typical(factors: Sequence[float], expected: float) -> None:
    assert typical(factors) == pytest.approx(expected)


def test_which_of_two_is_the_slower_one_does_not_matter() -> None:
    values = normal(Random(1), 1.3, 13)
    assert typical([1 / value for value in values]) == pytest.approx(1 / typical(values))
    assert typical([3 * value for value in values]) == pytest.approx(3 * typical(values))


def test_only_rounds_in_which_both_ran_are_compared() -> None:
    samples = {"a": [2.0, 4.0, 6.0], "b": [1.0, 2.0]}
    assert ratios(samples, "a", "b") == [2.0, 2.0]
    assert ratios(samples, "b", "a") == [0.5, 0.5]


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_the_noise_is_that_of_a_ratio_whatever_stalls_or_drifts(noise: float) -> None:
    random = Random(0)
    drift = [1.0, 3.0, 2.0, 8.0]

    def time(factor: float) -> float:
        return factor * exp(random.gauss(0.0, noise)) * (5.0 if random.random() < 0.05 else 1.0)

    samples = {str(way): [time(way * factor) for factor in drift] for way in range(1, 40)} | {"dropped out": [9.0]}
    assert noise_of(samples) == pytest.approx(2**0.5 * noise, rel=0.25)


def test_few_ways_or_one_round_do_not_say_how_noisy_it_is() -> None:
    assert noise_of({name: [1.0, 2.0] for name in "abc"}) == inf
    assert noise_of({name: [1.0] for name in "abcde"}) == inf
    assert noise_of({name: [1.0, 2.0] for name in "abcd"}) == 0.0
