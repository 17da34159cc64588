"""Does `shiplap tune` choose what measuring everything would choose?

Tunes a small model as `shiplap tune` does, then measures every candidate of every pass in all rounds, on the same
ranks:

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/tune.py gpt2 --output tune-gpt2.json

The fastest of many noisy measurements looks faster than it is. So where the two choices differ they are measured once
more, only they, in turns: by that the tuned one is behind or not. They agree if they are the same, or less than 1 %
apart, which `tune` itself does not count as faster.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from shiplap import GlobalEnv, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import TrainConfig
from shiplap.dist.launch import joined_world
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.train.setup import resolve_structure
from shiplap.tuning.candidates import candidates
from shiplap.tuning.contest import Ways
from shiplap.tuning.kinds import LayerKind, kinds_of
from shiplap.tuning.measured import Conditions, MeasuredPass
from shiplap.tuning.probe import Probe
from shiplap.tuning.race import Race, run_in_turns
from shiplap.tuning.run import conditions_of
from shiplap.tuning.statistics import ratios, typical
from shiplap.tuning.tune import TuneSettings, tune

_ALIKE = 0.01


def duel(
    tuned: MeasuredPass,
    exhaustive: MeasuredPass,
    *,
    kind: LayerKind,
    conditions: Conditions,
    parallel: ModelParallelConfig,
    env: GlobalEnv,
    rounds: int,
) -> Race | None:
    """Between two choices that differ."""
    if tuned.method == exhaustive.method:
        return None
    plans = candidates(kind.layer, tuned.direction, parallel)
    ways = Ways(
        kind=kind,
        probe=Probe(kind.layer, conditions.workload, env),
        direction=tuned.direction,
        keeps="shard",
        plans=plans,
    )
    return ways.race([tuned.method, exhaustive.method], most_rounds=rounds, drops=False)


def behind(race: Race | None) -> list[float]:
    """How much slower the tuned choice is than the exhaustive one, of each round; 0.03 is 3 %."""
    return [0.0] if race is None else [ratio - 1 for ratio in ratios(race.samples, *race.names)]


def typical_of(all_behind: Sequence[float]) -> float:
    """Around which they lie."""
    return typical([1 + one for one in all_behind]) - 1


def times_of(one: MeasuredPass) -> dict[str, float]:
    """Medians, in ms, of the ways of a pass."""
    return {name: timing.median_ms for name, timing in one.timings.items()}


def main() -> None:
    """Measure on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="of the model, in its debug size")
    parser.add_argument("--rounds", type=int, default=100, help="in which choices that differ are compared")
    parser.add_argument("--output", type=Path, help="write both plans' choices and times, as JSON")
    arguments = parser.parse_args()
    with joined_world("cpu"):
        parallel = ModelParallelConfig(
            tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
            sequence_parallel=True,
            tp_comm_overlap=True,
            tp_comm_overlap_rs_dgrad=True,
        )
        config = TrainConfig(parallel=parallel)
        env = init_all_env(parallel, device="cpu")
        torch.set_num_threads(1)
        sizes, adapters = resolve_structure(arguments.family, config)
        layers = list(
            parallel_layers(skeleton(arguments.family, config, model=sizes, adapters=adapters, rank=env.rank))
        )
        conditions = conditions_of(config, env.layout)
        plans, seconds = [], []
        for settings in (TuneSettings(), TuneSettings(is_exhaustive=True)):
            begun = time.perf_counter()
            plan = tune(
                layers,
                parallel,
                conditions=conditions,
                env=env,
                settings=settings,
                progress=lambda fraction, text: None,
            )
            plans.append(plan)
            seconds.append(time.perf_counter() - begun)
        of_passes = [kind for kind in kinds_of(layers) for _ in kind.directions]
        found = [
            (
                mine,
                best,
                duel(
                    mine,
                    best,
                    kind=kind,
                    conditions=conditions,
                    parallel=parallel,
                    env=env,
                    rounds=arguments.rounds,
                ),
            )
            for kind, mine, best in zip(of_passes, *(plan.passes for plan in plans), strict=True)
        ]
        run_in_turns(race for *_, race in found if race is not None)
        destroy_all_env()
    if env.rank > 0:
        return
    records = []
    for mine, best, race in found:
        ratio = behind(race)
        middle = typical_of(ratio)
        low, _, high = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else (middle,) * 3
        what = f"{' '.join(mine.layers)} {mine.direction}"
        print(f"{what:<36} {mine.method:<28} {best.method:<28} {middle:+.1%} ({low:+.1%} … {high:+.1%})")
        records.append(
            {"pass": mine.direction, "layers": list(mine.layers), "tuned": mine.method, "exhaustive": best.method}
            | {"behind": ratio, "times_ms": times_of(best), "tuned_times_ms": times_of(mine)}
            | {"tuned_rounds": {name: timing.rounds for name, timing in mine.timings.items()}}
        )
    all_behind = [typical_of(behind(race)) for *_, race in found]
    agree = sum(ratio < _ALIKE for ratio in all_behind)
    print(
        f"{agree} of {len(found)} agree; the worst is {max(all_behind):.1%} behind; "
        f"{seconds[0]:.0f} s and {seconds[1]:.0f} s"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
