"""Does `shiplap tune` choose what measuring everything would choose?

Tunes a small model as `shiplap tune` does, then measures every candidate of every pass in all rounds, on the same
ranks:

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/tune.py gpt2 --output tune-gpt2.json

Two choices agree if they are the same, or if the exhaustive measurement itself sees less than 1 % between them, which
is what makes the simpler of two the choice.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import TrainConfig
from shiplap.planning.layers import parallel_layers
from shiplap.planning.measured import MeasuredPass
from shiplap.planning.run import conditions_of
from shiplap.planning.skeleton import skeleton
from shiplap.planning.tune import TuneSettings, tune
from shiplap.topology.launch import joined_world
from shiplap.train.setup import resolve_structure


def behind(tuned: MeasuredPass, exhaustive: MeasuredPass) -> float:
    """How much slower the tuned choice is than the exhaustive one, by the exhaustive measurement; 0.03 is 3 %."""
    timings = exhaustive.timings
    return timings[exhaustive.method].speedup / timings[tuned.method].speedup - 1


def main() -> None:
    """Measure on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="of the model, in its debug size")
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
        plans = []
        for settings in (TuneSettings(), TuneSettings(is_exhaustive=True)):
            begun = time.perf_counter()
            plan = tune(
                layers,
                parallel,
                conditions=conditions_of(config, env.layout),
                env=env,
                settings=settings,
                progress=lambda fraction, text: None,
            )
            plans.append((plan, time.perf_counter() - begun))
        destroy_all_env()
    if env.rank > 0:
        return
    (tuned, tune_s), (exhaustive, exhaustive_s) = plans
    pairs = list(zip(tuned.passes, exhaustive.passes, strict=True))
    for mine, all_of_them in pairs:
        what = f"{' '.join(mine.layers)} {mine.direction}"
        print(f"{what:<36} {mine.method:<28} {all_of_them.method:<28} {behind(mine, all_of_them):+.1%}")
    agree = sum(mine.method == best.method or behind(mine, best) < 0.01 for mine, best in pairs)
    worst = max(behind(mine, best) for mine, best in pairs)
    print(f"{agree} of {len(pairs)} agree; the worst is {worst:.1%} behind; {tune_s:.0f} s and {exhaustive_s:.0f} s")
    if arguments.output:
        record = [
            {"pass": mine.direction, "layers": list(mine.layers), "tuned": mine.method, "exhaustive": best.method}
            | {"behind": behind(mine, best), "times_ms": {n: t.median_ms for n, t in best.timings.items()}}
            for mine, best in pairs
        ]
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
