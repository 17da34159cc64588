"""Which way is the fastest, decided from synthetic times: noise with long tails, and a machine whose speed drifts."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random

import pytest

from shiplap.tuning.race import Choice, Race, choose, is_decided, is_out, leader_of, run_in_turns

SEEDS = range(60)
FIRST = "none"


class Machine:
    """Takes so long for each way, times a drift that all ways of a round share, with noise and sometimes a stall."""

    def __init__(self, times: Mapping[str, float], seed: int, *, noise: float = 0.01, stalls: float = 0.05) -> None:
        self.times, self.noise, self.stalls = times, noise, stalls
        self.calls: list[str] = []
        self._random, self._drift = Random(seed), 1.0

    def next_round(self) -> bool:
        self._drift *= self._random.uniform(0.8, 1.25)
        return True

    def __call__(self, name: str) -> float:
        self.calls.append(name)
        stall = 1.0 + self._random.expovariate(1.0) if self._random.random() < self.stalls else 1.0
        return self.times[name] * self._drift * stall * (1.0 + abs(self._random.gauss(0.0, self.noise)))


def race(
    names: Sequence[str],
    measure: Callable[[str], float],
    *,
    most_rounds: int,
    go_on: Callable[[], bool],
    drops: bool = True,
) -> dict[str, list[float]]:
    alone = Race(names=names, measure=measure, most_rounds=most_rounds, drops=drops)
    run_in_turns([alone], lambda race: go_on())
    return alone.samples


def chosen(
    times: Mapping[str, float], seed: int, *, most_rounds: int = 20, drops: bool = True, **noise: float
) -> Choice:
    machine = Machine(times, seed, **noise)
    return choose(race(list(times), machine, most_rounds=most_rounds, go_on=machine.next_round, drops=drops))


def share(is_right: Callable[[int], bool], seeds: range = SEEDS) -> float:
    return sum(map(is_right, seeds)) / len(seeds)


MANY = {f"way {number}": 1.0 + 0.03 * number for number in range(12)}


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("others", [{}, MANY], ids=["of 2", "of 14"])
def test_what_is_clearly_the_best_is_found(others: dict[str, float], drops: bool) -> None:
    times = {FIRST: 1.0, **others, "best": 0.9}

    def is_right(seed: int) -> bool:
        choice = chosen(times, seed, drops=drops)
        return choice.name == "best" and choice.is_clear and choice.speedup == pytest.approx(1 / 0.9, rel=0.05)

    assert share(is_right) >= 0.95


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_what_is_chosen_is_never_clearly_slower_than_the_first(noise: float) -> None:
    """However noisy: the others are slower by 2 % and more."""
    times = {FIRST: 1.0} | {f"way {number}": 1.02 + 0.02 * number for number in range(12)}
    choices = [chosen(times, seed, noise=noise) for seed in SEEDS]
    assert max(times[choice.name] for choice in choices) <= 1.02
    assert sum(choice.name == FIRST for choice in choices) >= 0.98 * len(choices)


@pytest.mark.parametrize("num_ways", [2, 9, 27])
@pytest.mark.parametrize("noise", [0.003, 0.05])
def test_what_is_no_faster_is_not_chosen(num_ways: int, noise: float) -> None:
    """All the same: chance makes one look faster in few cases, though it has many to choose from."""
    times = {FIRST: 1.0} | {f"way {number}": 1.0 for number in range(num_ways - 1)}
    assert share(lambda seed: chosen(times, seed, noise=noise).name == FIRST) >= 0.85


@pytest.mark.parametrize("seeds", [range(12), pytest.param(SEEDS, marks=pytest.mark.full)])
def test_many_looks_do_not_make_chance_certain(seeds: range) -> None:
    """Two equally fast ways on a noisy machine, which is asked up to 200 times whether it is decided."""
    times = {FIRST: 1.0, "other": 1.0}
    assert share(lambda seed: chosen(times, seed, noise=0.1, most_rounds=200).name == FIRST, seeds) >= 0.8


def test_less_than_a_percent_is_not_worth_it() -> None:
    times = {FIRST: 1.0, "hardly": 0.994}
    choices = [chosen(times, seed, noise=0.001, stalls=0.0) for seed in SEEDS]
    assert {choice.name for choice in choices} == {FIRST}
    assert {choice.speedup for choice in choices} == {1.0}
    assert all(choice.is_clear for choice in choices)


def test_of_those_as_good_as_the_best_the_simplest_is_chosen() -> None:
    times = {FIRST: 1.0, "simple": 0.8, "intricate": 0.798, "slow": 0.9}
    assert share(lambda seed: chosen(times, seed, noise=0.001, stalls=0.0).name == "simple") == 1.0


def test_the_simplest_is_not_chosen_where_another_is_better() -> None:
    times = {FIRST: 1.0, "simple": 0.9, "intricate": 0.8}
    assert share(lambda seed: chosen(times, seed).name == "intricate") >= 0.95


def test_equal_times_are_a_tie_for_the_first() -> None:
    choice = choose({FIRST: [2.0] * 6, "other": [2.0] * 6})
    assert choice == Choice(name=FIRST, is_clear=True, speedup=1.0, num_rounds=6)


def test_a_stall_does_not_decide() -> None:
    """One round in which the best took ten times as long."""
    fast = [0.8, 0.8, 8.0, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    assert choose({FIRST: [1.0] * len(fast), "best": fast}).name == "best"


def test_what_all_suffer_in_a_round_decides_nothing() -> None:
    """Times of different rounds overlap; those of one round say that the other is faster."""
    drift = [1.0, 3.0, 0.5, 2.0, 7.0, 1.5, 4.0, 0.7]
    samples = {FIRST: drift, "best": [0.9 * time for time in drift]}
    choice = choose(samples)
    assert (choice.name, choice.is_clear) == ("best", True)
    assert choice.speedup == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("other", [0.5, 1.0, 1.05])
def test_too_few_rounds_say_nothing(num_rounds: int, other: float) -> None:
    samples = {FIRST: [1.0] * num_rounds, "other": [other] * num_rounds}
    assert choose(samples) == Choice(name=FIRST, is_clear=False, speedup=1.0, num_rounds=num_rounds)


def test_a_way_alone_is_clear_at_once() -> None:
    assert choose({FIRST: [1.0]}) == Choice(name=FIRST, is_clear=True, speedup=1.0, num_rounds=1)


def test_when_all_others_dropped_out_the_first_is_clear() -> None:
    assert choose({FIRST: [1.0, 1.0, 1.0], "slow": [2.0, 2.0]}).is_clear


def test_noise_that_hides_a_gain_is_not_clear() -> None:
    """Typically faster by a tenth, but slower by more in two rounds of seven."""
    other = [0.9, 0.9, 0.9, 0.9, 0.9, 1.2, 1.2]
    assert choose({FIRST: [1.0] * 7, "other": other}) == Choice(name=FIRST, is_clear=False, speedup=1.0, num_rounds=7)


@pytest.mark.parametrize(
    ("slower", "noise", "expected"),
    [
        ([9.0], 0.0, False),
        ([1.06, 1.06], 0.0, True),
        ([1.06, 1.04], 0.0, False),
        ([1.3, 1.3], 0.1, True),
        ([1.3, 1.2], 0.1, False),
        ([1.25] * 3, 0.1, True),
        ([1.2] * 3, 0.1, False),
        ([1.2] * 4, 0.1, True),
        ([2.0] * 4, 0.6, False),
        ([2.0] * 4, inf, False),
        ([1.02] * 5, 0.1, False),
        ([1.02] * 6, 0.1, True),
        ([1.005] * 20, 0.0, False),
        ([1.3, 1.3, 1.3, 1.3, 0.9], 0.1, True),
        ([1.3, 1.3, 1.3, 1.3, 0.9], 0.2, False),
        ([1.3, 1.3, 1.3, 1.3, 0.9], inf, False),
    ],
)
def test_what_drops_out(slower: list[float], noise: float, expected: bool) -> None:
    samples = {"leader": [1.0] * len(slower), "other": slower}
    assert is_out(samples, "other", "leader", noise=noise) == expected


def test_on_a_noisy_machine_the_best_does_not_drop_out_early() -> None:
    """As the passes of a small model over loopback: in 20 rounds the best of nine is out in few of the races."""
    times = {FIRST: 1.0, "best": 0.8} | {f"way {number}": 1.0 + 0.1 * number for number in range(7)}

    def survives(seed: int) -> bool:
        machine = Machine(times, seed, noise=0.5)
        samples = race(list(times), machine, most_rounds=20, go_on=machine.next_round)
        return len(samples["best"]) == max(map(len, samples.values()))

    assert share(survives) >= 0.9


def test_a_stall_on_a_drifting_machine_does_not_change_who_leads() -> None:
    """The stalled round is as slow as a later one, so that the median of the best is a later round's."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    best = [0.9 * time for time in drift]
    best[0] *= 9.0
    assert leader_of({FIRST: [1.1 * time for time in drift], "best": best, "other": drift}) == "best"


def test_what_dropped_out_leads_no_more() -> None:
    assert leader_of({FIRST: [3.0, 3.0, 3.0], "lucky": [1.0, 1.0], "other": [2.0, 2.0, 9.0]}) == "other"


def test_it_is_decided_when_all_that_still_run_are_alike() -> None:
    samples = {FIRST: [1.2] * 8, "best": [1.0] * 8, "as good": [1.005] * 8, "slower": [1.02] * 8}
    assert is_decided(samples, [FIRST, "best", "as good"])
    assert not is_decided(samples, [FIRST, "best", "as good", "slower"])
    # Whoever asks after every round must be surer than who asks once: with seven rounds it is not over.
    fewer = {name: times[:7] for name, times in samples.items()}
    assert not is_decided(fewer, [FIRST, "best", "as good"])
    assert choose(fewer).name == "best"


def test_it_is_decided_when_the_first_is_as_good_as_the_best() -> None:
    assert is_decided({FIRST: [1.005] * 6, "best": [1.0] * 6}, [FIRST, "best"])


def test_a_race_ends_as_soon_as_it_is_decided() -> None:
    machine = Machine({FIRST: 1.0, "best": 0.5, "slow": 2.0, "fair": 0.52}, seed=0, noise=0.0, stalls=0.0)
    samples = race(list(machine.times), machine, most_rounds=20, go_on=machine.next_round)
    # The slow one is slower by more than the margin in two rounds; the first is never dropped; eight rounds tell.
    assert {name: len(times) for name, times in samples.items()} == {FIRST: 8, "best": 8, "slow": 2, "fair": 5}


def test_without_dropping_out_all_take_part_in_every_round() -> None:
    machine = Machine({FIRST: 1.0, "best": 0.5, "slow": 2.0}, seed=0)
    samples = race([FIRST, "best", "slow"], machine, most_rounds=7, go_on=machine.next_round, drops=False)
    assert {name: len(times) for name, times in samples.items()} == {FIRST: 7, "best": 7, "slow": 7}


def test_every_round_begins_with_another_way() -> None:
    """Whoever comes first in a round may pay for something that the others do not."""
    machine = Machine({FIRST: 1.0, "b": 1.0, "c": 1.0}, seed=0)
    race([FIRST, "b", "c"], machine, most_rounds=4, go_on=machine.next_round, drops=False)
    rounds = [machine.calls[start : start + 3] for start in range(0, 12, 3)]
    assert rounds == [[FIRST, "b", "c"], ["b", "c", FIRST], ["c", FIRST, "b"], [FIRST, "b", "c"]]


def test_a_race_stops_when_it_is_told_to() -> None:
    answers = iter([True, True, False])
    machine = Machine({FIRST: 1.0, "other": 0.99}, seed=0)
    samples = race([FIRST, "other"], machine, most_rounds=20, go_on=lambda: next(answers))
    assert {name: len(times) for name, times in samples.items()} == {FIRST: 3, "other": 3}
    choice = choose(samples)
    assert (choice.name, choice.is_clear) == (FIRST, False)


def test_one_round_is_always_run() -> None:
    machine = Machine({FIRST: 1.0, "other": 0.5}, seed=0)
    samples = race([FIRST, "other"], machine, most_rounds=20, go_on=lambda: False)
    assert machine.calls == [FIRST, "other"]
    assert choose(samples).name == FIRST


def test_bad_luck_in_the_first_round_does_not_end_the_race() -> None:
    machine = Machine({FIRST: 1.0, "best": 0.8}, seed=0, noise=0.0, stalls=0.0)
    stalls = iter([1.0, 3.0])
    samples = race(
        [FIRST, "best"], lambda name: machine(name) * next(stalls, 1.0), most_rounds=20, go_on=machine.next_round
    )
    assert samples["best"][0] == pytest.approx(2.4)
    assert choose(samples).name == "best"


def test_the_same_times_give_the_same_choice() -> None:
    """Ranks are given the same times, and must all measure the same next."""
    for seed in range(10):
        machines = [Machine({FIRST: 1.0} | MANY, seed, noise=0.05) for _ in range(2)]
        runs = [race(list(m.times), m, most_rounds=20, go_on=m.next_round) for m in machines]
        assert machines[0].calls == machines[1].calls
        assert choose(runs[0]) == choose(runs[1])


def test_races_in_turns_last_as_long_as_all_together() -> None:
    """Two races of which one is decided earlier; a round of one comes between two of the other."""
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return 1.0

    races = [
        Race(names=names, measure=measure, most_rounds=rounds, drops=False) for names, rounds in (("ab", 2), ("c", 3))
    ]
    run_in_turns(races)
    assert "".join(calls) == "abc" + "bac" + "c"
    assert [race.num_rounds for race in races] == [2, 3]
    assert all(race.is_over for race in races)


def test_one_race_may_stop_and_the_others_go_on() -> None:
    races = [Race(names="ab", measure=lambda name: 1.0, most_rounds=5, drops=False) for _ in range(2)]
    run_in_turns(races, lambda race: race is races[1])
    assert [race.num_rounds for race in races] == [1, 5]


def test_races_do_not_share_what_dropped_out() -> None:
    """What dropped out in one race says nothing about another one with the same names."""
    fast = {"a": 1.0, "b": 3.0, "c": 1.0, "d": 1.0}
    first = Race(names="abcd", measure=fast.__getitem__, most_rounds=4)
    second = Race(names="abcd", measure=lambda name: 1.0, most_rounds=4)
    run_in_turns([first, second])
    assert [len(first.samples[name]) for name in "abcd"] == [4, 2, 4, 4]
    assert [len(second.samples[name]) for name in "abcd"] == [4, 4, 4, 4]


def test_for_want_of_time_only_the_fastest_and_the_first_go_on() -> None:
    times = {FIRST: 3.0, "b": 2.9, "c": 2.7, "d": 2.8}
    race = Race(names=list(times), measure=times.__getitem__, most_rounds=20)
    race.run_round()
    assert (race.num_running, race.is_cut_short) == (4, False)
    race.keep(4)
    assert not race.is_cut_short
    race.keep(2)
    assert (race.num_running, race.is_cut_short) == (2, True)
    run_in_turns([race])
    assert {name: len(values) for name, values in race.samples.items()} == {FIRST: 8, "b": 1, "c": 8, "d": 1}
    assert choose(race.samples).name == "c"


def test_whoever_asks_is_told_after_each_turn_what_still_runs() -> None:
    races = [Race(names="ab", measure=lambda name: 1.0, most_rounds=rounds, drops=False) for rounds in (1, 2)]
    seen: list[list[int]] = []
    run_in_turns(races, after_turn=lambda running: seen.append([races.index(race) for race in running]))
    assert seen == [[1], []]
