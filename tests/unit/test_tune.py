"""What `tune` makes of times: in one process, with layers that take as long as they are said to, by the clock too."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from shiplap import GlobalEnv, destroy_all_env, init_all_env
from shiplap.commands.tune import TuneConfig, TuneOptions, as_text
from shiplap.config import TrainConfig
from shiplap.dist.axes import layout_for
from shiplap.inspection.layers import ParallelLayer, parallel_layers
from shiplap.overlap.plan import ColumnPlan
from shiplap.overlap.registry import SEQUENTIAL
from shiplap.tuning.candidates import Pass, Plan, candidates
from shiplap.tuning.measured import MeasuredPass, MeasuredPlan
from shiplap.tuning.probe import Probe, Repeats, Workload
from shiplap.tuning.run import conditions_of
from shiplap.tuning.tune import TuneSettings, tune, unclear
from tests.cases.measured import SMALL, model_of, run_of

HEAD = "head.projection"
Cost = Callable[[ParallelLayer, Pass, Plan], float]


class Clock:
    """Seconds that pass only where a layer runs; from now on, as the real one may have been read before."""

    def __init__(self) -> None:
        self.begun, self.spent = time.perf_counter(), 0.0

    def __call__(self) -> float:
        return self.begun + self.spent


class FakeProbe:
    """Takes as long as `cost` says; and as long again for what is not timed."""

    cost: Cost
    clock: Clock
    calls: list[tuple[str, Pass, Plan]]

    def __init__(self, layer: ParallelLayer, workload: Workload, env: GlobalEnv) -> None:
        self.layer, self.env = layer, env

    def milliseconds(self, direction: Pass, plan: Plan) -> float:
        cost = type(self).cost(self.layer, direction, plan)
        self.calls.append((self.layer.path, direction, plan))
        self.clock.spent += 2e-3 * cost
        return cost

    def seconds_of_a_measurement(self, direction: Pass, plan: Plan) -> float:
        return 2e-3 * self.milliseconds(direction, plan)


@pytest.fixture
def env() -> Iterator[GlobalEnv]:
    yield init_all_env(device="cpu")
    destroy_all_env()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(FakeProbe, "clock", clock, raising=False)
    monkeypatch.setattr(FakeProbe, "calls", [], raising=False)
    monkeypatch.setattr("shiplap.tuning.tune.Probe", FakeProbe)
    monkeypatch.setattr("shiplap.tuning.tune.time.perf_counter", clock)
    return clock


def tuned(
    config: TrainConfig, cost: Cost, env: GlobalEnv, said: list[tuple[float, str]] | None = None, **settings: Any
) -> MeasuredPlan:
    FakeProbe.cost = staticmethod(cost)
    return tune(
        parallel_layers(model_of(config)),
        config.parallel,
        conditions=conditions_of(config, layout_for(config.parallel, 2)),
        env=env,
        settings=TuneSettings(**settings),
        progress=lambda fraction, text: None if said is None else said.append((fraction, text)),
    )


def by_pass(plan: MeasuredPlan) -> dict[str, MeasuredPass]:
    return {f"{' '.join(one.layers)} {one.direction}": one for one in plan.passes}


def constant(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
    return 10.0


def best_is(**best: str) -> Cost:
    """Sites named take 40 % of the time where they have these methods."""

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        sites = ("forward",) if direction == "forward" else ("dgrad", "wgrad")
        names = {site: f"{layer.kind}_{site}" for site in sites if hasattr(plan, site)}
        return 10.0 - sum(3.0 for site, name in names.items() if best.get(name) == str(getattr(plan, site)))

    return cost


def test_every_pass_of_every_kind_has_its_timings(env: GlobalEnv, clock: Clock) -> None:
    config = run_of()
    said: list[tuple[float, str]] = []
    plan = tuned(config, constant, env, said)
    layers = {layer.path: layer for layer in parallel_layers(model_of(config))}
    assert list(by_pass(plan)) == [
        f"{path} {direction}"
        for path in (*(f"blocks.*.{name}" for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")), HEAD)
        for direction in ("forward", "backward")
    ]
    for one in plan.passes:
        layer = layers[one.layers[0].replace("*", "0")]
        assert list(one.timings) == list(candidates(layer, one.direction, config.parallel))
        assert all(timing.rounds >= 5 for timing in one.timings.values())
        assert (one.method, one.is_clear, one.speedup, one.kept) == ("sequential", True, 1.0, None)
    plan.check(model_of(config), config.parallel, plan.conditions)
    fractions = [fraction for fraction, _ in said]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert said[1][1] == "round 2, 10 of 10 races open"


def test_the_fastest_is_chosen_where_it_is(env: GlobalEnv, clock: Clock) -> None:
    config = run_of(tp_comm_overlap_rs_dgrad=True)
    best = {"column_forward": "ring:4", "column_dgrad": "p2p", "column_wgrad": "bulk", "row_forward": "reduce"}
    plan = tuned(config, best_is(**best), env)
    passes = by_pass(plan)
    assert passes["blocks.*.mlp.fc1 forward"].fields == {"forward": "ring:4"}
    assert passes["blocks.*.mlp.fc1 backward"].fields == {"dgrad": "p2p", "wgrad": "bulk", "keeps": "shard"}
    assert passes["blocks.*.mlp.fc1 backward"].speedup == pytest.approx(10 / 4)
    assert passes["blocks.*.mlp.fc2 forward"].fields == {"forward": "reduce"}
    assert passes["blocks.*.mlp.fc2 backward"].fields == {"dgrad": "sequential", "wgrad": "whole"}
    model = model_of(config)
    plan.check(model, config.parallel, plan.conditions)
    plan.apply(model)
    for layer in parallel_layers(model):
        for site in ("forward", "dgrad", "wgrad"):
            method = getattr(layer.module.plan, site, None)
            assert str(method) in ("None", "whole", best.get(f"{layer.kind}_{site}", "sequential"))


def test_what_is_off_is_not_run(env: GlobalEnv, clock: Clock) -> None:
    tuned(run_of(tp_comm_overlap_ag=False, tp_comm_bulk_dgrad=False), constant, env)
    assert {str(plan.forward) for _, direction, plan in FakeProbe.calls if direction == "forward"} >= {"reduce"}
    columns = [plan for _, _, plan in FakeProbe.calls if isinstance(plan, ColumnPlan)]
    assert {(plan.forward, plan.dgrad) for plan in columns} == {(SEQUENTIAL, SEQUENTIAL)}


def keeping(gain: float) -> Cost:
    """Backward takes so much less where the gathered input is kept."""

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        return 10.0 - (gain if isinstance(plan, ColumnPlan) and plan.keeps == "gathered" else 0.0)

    return cost


@pytest.mark.parametrize("takes", [False, True])
def test_what_keeping_the_gathered_input_would_change(env: GlobalEnv, clock: Clock, takes: bool) -> None:
    config = run_of()
    plan = tuned(config, keeping(2.0), env, compares_kept=True, takes_kept=takes)
    for name, one in by_pass(plan).items():
        is_column_s = one.layer["kind"] == "column" and one.direction == "backward"
        assert (one.kept is not None) == is_column_s, name
        if one.kept is not None:
            assert one.kept.speedup == pytest.approx(10 / 8)
            assert one.kept.is_clear
            # One more shard of 8 tokens of 3 sequences, 32 values in float32.
            assert one.kept.memory_bytes == 8 * 3 * 32 * 4
            assert one.fields["keeps"] == ("gathered" if takes else "shard")
    plan.check(model_of(config), config.parallel, plan.conditions)


@pytest.mark.parametrize("gain", [0.0, 0.05, -2.0])
def test_more_memory_is_not_taken_for_nothing(env: GlobalEnv, clock: Clock, gain: float) -> None:
    plan = tuned(run_of(), keeping(gain), env, compares_kept=True, takes_kept=True)
    assert all(one.fields["keeps"] == "shard" for one in plan.passes if "keeps" in one.fields)


def test_who_asks_to_keep_it_keeps_it(env: GlobalEnv, clock: Clock) -> None:
    config = run_of(tp_comm_keep_gathered=True)
    plan = tuned(config, keeping(-2.0), env, compares_kept=True)
    one = by_pass(plan)["blocks.*.mlp.fc1 backward"]
    assert one.fields["keeps"] == "gathered"
    assert one.kept is not None
    assert one.kept.speedup == pytest.approx(10 / 12)
    plan.check(model_of(config), config.parallel, plan.conditions)


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("seconds", [3.0, 20.0, 100.0])
def test_time_runs_out(env: GlobalEnv, clock: Clock, seconds: float, compares: bool) -> None:
    """All are equally fast but for a little, so that nothing is decided; 10 ms and as much again each."""
    noise = Random(0)

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        return 10.0 + noise.uniform(0.0, 0.6)

    plan = tuned(run_of(), cost, env, seconds=seconds, compares_kept=compares)
    # The last round of each race may be over the limit, and each race has two ways and one round at least.
    assert clock.spent <= 1.1 * seconds + 0.5
    assert len(plan.passes) == 10
    # Chance makes one of so many ways look faster in few passes.
    assert sum(one.method == "sequential" for one in plan.passes) >= 9


@pytest.mark.parametrize("path", ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2"])
def test_one_layer_has_all_the_time_and_no_more(env: GlobalEnv, clock: Clock, path: str) -> None:
    """No other pass makes up for what one takes too long, as three races of a Column layer's backward might."""
    count = iter(range(10**9))
    config = run_of(tp_comm_overlap_rs_dgrad=True)
    FakeProbe.cost = staticmethod(lambda layer, direction, plan: 10.0 + next(count) % 7 * 0.1)
    plan = tune(
        [layer for layer in parallel_layers(model_of(config)) if layer.path == path],
        config.parallel,
        conditions=conditions_of(config, layout_for(config.parallel, 2)),
        env=env,
        settings=TuneSettings(seconds=6.0, compares_kept=True),
        progress=lambda fraction, text: None,
    )
    assert [one.direction for one in plan.passes] == ["forward", "backward"]
    assert 3.0 < clock.spent <= 6.2


def test_little_time_is_spent_on_few_ways(env: GlobalEnv, clock: Clock) -> None:
    """Two ways in one round say nothing, and what was not measured is not known to be slower."""
    plan = tuned(run_of(), constant, env, seconds=1.0)
    assert all(len(one.timings) == 2 for one in plan.passes)
    assert [one.method for one in plan.passes] == ["sequential"] * 10
    assert len(unclear(plan.passes)) == 10
    assert unclear(plan.passes)[0] == "blocks.*.attention.qkv forward"


def test_the_first_ways_are_clear_and_others_were_left_out(env: GlobalEnv, clock: Clock) -> None:
    """Time for some ways in enough rounds: what is clearly faster is so, but that nothing is faster is not known."""
    plan = tuned(run_of(), best_is(row_forward="p2p"), env, seconds=4.0)
    passes = by_pass(plan)
    assert 2 <= len(passes["blocks.*.mlp.fc2 forward"].timings) < 8
    assert passes["blocks.*.mlp.fc2 forward"].method == "p2p"
    assert passes["blocks.*.mlp.fc2 forward"].is_clear
    assert not passes["blocks.*.mlp.fc1 backward"].is_clear


def test_the_last_way_is_found_though_there_is_no_time_for_all(env: GlobalEnv, clock: Clock) -> None:
    """A round of all 10 passes takes about 2 s, twice that the first time: six of them would take too long."""
    plan = tuned(
        run_of(),
        best_is(row_forward="feature_chunks own_first", column_forward="feature_chunks own_first"),
        env,
        seconds=8.0,
    )
    passes = by_pass(plan)
    for name in ("fc1", "fc2"):
        one = passes[f"blocks.*.mlp.{name} forward"]
        assert (one.method, one.is_clear) == ("feature_chunks own_first", True)
        assert list(one.timings)[-1] == "feature_chunks own_first"
        assert one.timings["feature_chunks own_first"].rounds > one.timings["feature_chunks:8"].rounds
    assert clock.spent <= 8.8
    # Where nothing is faster, what there was no time for might have been.
    assert not passes["blocks.*.mlp.fc2 backward"].is_clear


def test_where_time_is_short_as_many_go_on_as_show_the_noise(env: GlobalEnv, clock: Clock) -> None:
    """Of four ways the few rounds tell that one takes less than half of the time; of two they would not."""
    noise = Random(0)

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        is_best = isinstance(plan, ColumnPlan) and str(plan.forward) == "ring"
        return (10.0 if layer.path == HEAD else 0.1) * (0.4 if is_best else 1.0) * noise.uniform(1.0, 1.2)

    one = by_pass(tuned(run_of(), cost, env, seconds=0.9))[f"{HEAD} forward"]
    rounds = [timing.rounds for timing in one.timings.values()]
    assert max(rounds) < 7
    assert sum(number > 1 for number in rounds) >= 4
    assert (one.method, one.is_clear) == ("ring", True)


def test_where_time_is_short_the_plan_comes_before_what_is_only_compared(env: GlobalEnv, clock: Clock) -> None:
    tuned(run_of(), constant, env, seconds=9.0, compares_kept=True)
    backwards = [plan for _, direction, plan in FakeProbe.calls if direction == "backward"]
    keeps = [plan.keeps for plan in backwards if isinstance(plan, ColumnPlan)]
    # Three kinds of Column layers, each of which says first how long a measurement takes, with either input.
    assert keeps[:6].count("gathered") == 3
    before = keeps[6 : keeps.index("gathered", 6)]
    assert len(before) > 0.5 * len(keeps)


def test_unlimited_time_is_a_time_too(env: GlobalEnv, clock: Clock) -> None:
    plan = tuned(run_of(), constant, env, seconds=float("inf"))
    assert all(one.is_clear for one in plan.passes)


def test_the_last_pass_has_what_the_others_leave(env: GlobalEnv, clock: Clock) -> None:
    """Passes that are decided at once leave their time to those that are not."""
    count = iter(range(10**9))

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        if layer.path != HEAD:
            return best_is(column_forward="ring", row_forward="p2p")(layer, direction, plan)
        return 100.0 + next(count) % 7

    plan = tuned(run_of(), cost, env, seconds=60.0)
    assert len(by_pass(plan)[f"{HEAD} backward"].timings) == 10


def test_what_is_not_clear_is_measured_once_more_alone(env: GlobalEnv, clock: Clock) -> None:
    """A ring that is faster by 5 % on a machine that is noisier than that: 20 rounds do not tell, 60 do."""
    noise = Random(0)

    def cost(layer: ParallelLayer, direction: Pass, plan: Plan) -> float:
        if direction == "backward" or plan.forward == SEQUENTIAL:
            return 100.0
        if str(plan.forward) != "ring":
            return 300.0 * noise.uniform(0.6, 1.4)
        return 95.0 * noise.uniform(0.8, 1.2)

    name = "blocks.*.attention.qkv forward"
    one = by_pass(tuned(run_of(), cost, env))[name]
    assert (one.method, one.is_clear) == ("ring", True)
    assert 1.01 < one.speedup < 1.2
    assert one.timings["ring"].rounds == 20
    for settings in ({"is_exhaustive": True}, {"seconds": 100.0}):
        one = by_pass(tuned(run_of(), cost, env, **settings))[name]
        assert (one.method, one.is_clear) == ("sequential", False)


def test_exhaustive_runs_everything_in_all_rounds(env: GlobalEnv, clock: Clock) -> None:
    plan = tuned(run_of(), best_is(row_forward="reduce"), env, is_exhaustive=True)
    rounds = {timing.rounds for one in plan.passes for timing in one.timings.values() if len(one.timings) > 1}
    assert rounds == {60}
    assert by_pass(plan)["blocks.*.mlp.fc2 forward"].method == "reduce"


def test_a_pass_without_a_choice_is_measured_and_clear(env: GlobalEnv, clock: Clock) -> None:
    plan = tuned(run_of(tp_comm_overlap_ag=False), constant, env, seconds=60.0)
    one = by_pass(plan)["blocks.*.mlp.fc1 forward"]
    assert (list(one.timings), one.is_clear) == (["sequential"], True)


def test_the_table(env: GlobalEnv, clock: Clock) -> None:
    config = run_of()
    asked = TuneConfig(parallel=config.parallel, model=SMALL, data=config.data, tune=TuneOptions(output="my plan.json"))
    plan = tuned(config, best_is(column_forward="ring:2", row_forward="p2p"), env, compares_kept=True)
    open_one = replace(plan.passes[1], is_clear=False)
    text = as_text(replace(plan, passes=[plan.passes[0], open_one, *plan.passes[2:]]), asked)
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "pass", "method", "ms", "against", "none", "of"]
    assert lines[1].split() == ["blocks.*.attention.qkv", "forward", "ring:2", "7.00", "1.43×", "7"]
    assert lines[2].split() == [
        "blocks.*.attention.qkv",
        "backward",
        "sequential",
        "10.00",
        "1.00×",
        "10",
        "not",
        "clear",
    ]
    assert len([line for line in lines if "with the gathered input kept" in line]) == 3
    assert "--tp-comm-overlap-rs-dgrad is off" in text
    assert "not clear: the machine is too noisy" in text
    assert "not clear" not in as_text(plan, asked)


@pytest.mark.parametrize(("direction", "expected"), [("forward", 5 * 3e-3), ("backward", 5 * (3e-3 + 4e-3))])
def test_the_forward_before_each_backward_takes_time(
    env: GlobalEnv, monkeypatch: pytest.MonkeyPatch, direction: Pass, expected: float
) -> None:
    config = run_of(size=1, sequence_parallel=False, tp_comm_overlap=False)
    layer = next(parallel_layers(model_of(config)))
    probe = Probe(layer, Workload(sequence=16, batch=3, dtype="float32"), env)
    monkeypatch.setattr(Probe, "milliseconds", lambda _, direction, plan: {"forward": 3.0, "backward": 4.0}[direction])
    monkeypatch.setattr(Repeats, "__getitem__", lambda _, key: 5)
    assert probe.seconds_of_a_measurement(direction, ColumnPlan()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("once", "expected"),
    [(0.0, [1, 1, 50, 50]), (0.1, [1, 1, 50, 50]), (1.0, [1, 1, 6, 6]), (4.0, [1, 1, 2, 2]), (100.0, [1, 1, 1])],
)
def test_what_is_short_is_repeated(once: float, expected: list[int]) -> None:
    """The first run, which pays for more, is not what is told; what is long has no run to spare."""
    repeats, runs = Repeats(), []

    def time_it(number: int) -> float:
        runs.append(number)
        return once * number + (15.0 if len(runs) == 1 else 0.0)

    times = [repeats.milliseconds("it", time_it) for _ in range(2)]
    assert times == [pytest.approx(once)] * 2
    assert runs == expected
    assert repeats["it"] == expected[-1]
