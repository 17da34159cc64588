r"""Is the measured plan never slower than no overlap, and how much does it hide? Many shapes, in one run on real ranks.

Run it on every rank. The ratio of communication to computation follows from the link: on the machine of
docs/benchmarks.md, with two hosts, these are about 0.2, 0.5, 1 and 2:

    for rate in 665mbit 266mbit 133mbit 66mbit; do
        sudo scripts/hosts.py --hosts 2 --rate $rate --offload -- \
            .venv/bin/python benchmarks/sweep.py --part mlp --output sweep-tp2.jsonl
    done
    for rate in 1125mbit 450mbit 225mbit 112mbit; do
        sudo scripts/hosts.py --hosts 2 --rate $rate --offload -- \
            .venv/bin/python benchmarks/sweep.py --part attention --output sweep-tp2.jsonl
    done

Four hosts share its two cores, and sending costs them time, too. Layers twice as wide have twice as much to multiply
for each byte, so that this counts half:

    sudo scripts/hosts.py --hosts 4 --rate 66mbit --offload -- .venv/bin/python benchmarks/sweep.py \
        --part attention --lengths 128 --width 2 --rounds 7 --tune-seconds 1020 --output sweep-tp4.jsonl

For each shape it tunes the plan of the part's layers (what `shiplap tune` does), then runs all variants once a round,
in an order that rotates: nothing overlapped, the default switches, the plan; the same with the gathered input kept;
DTensor; the products alone and the communication alone. A variant's time in a round is that of its slowest rank. Ratios
are medians of the ratios of each round.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shiplap import GlobalEnv, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import TransformerConfig
from shiplap.dist.launch import joined_world
from shiplap.inspection.layers import ParallelLayer
from shiplap.tools.bench.peers import PEERS, seat
from shiplap.tuning.candidates import Plan, candidates, sequential_plan, with_fields
from shiplap.tuning.measured import Conditions, MeasuredPass, MeasuredPlan
from shiplap.tuning.parts import Part, attention_part, mlp_part
from shiplap.tuning.probe import Workload
from shiplap.tuning.statistics import ratios
from shiplap.tuning.tune import TuneSettings, tune

HEAD_SIZE = 64
MLP_HIDDEN, MLP_FFN_PER_RANK = 512, 6144
ATTENTION_HIDDEN_PER_RANK = 1536
LENGTHS: dict[int, dict[str, Sequence[int]]] = {
    2: {"mlp": (32, 128, 256, 512), "attention": (16, 64, 128, 256)},
    4: {"mlp": (32, 64, 128, 256, 512, 1024), "attention": (32, 64, 128, 256, 512)},
}
"""By the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A part of a model, and how long its sequence is.

    Attributes:
        part: `mlp` or `attention`.
        sequence: S.
        hidden: H.
        ffn: F; of attention 0.
    """

    part: str
    sequence: int
    hidden: int
    ffn: int

    def __str__(self) -> str:
        """Such as `mlp S=256 H=512 F=6144`."""
        return f"{self.part} S={self.sequence} H={self.hidden}" + (f" F={self.ffn}" if self.ffn else "")


def shapes(num_ranks: int, width: int = 1) -> list[Shape]:
    """A rank's products of a token are as large at every TP size, so that they are to the bytes on its link.

    Args:
        num_ranks: R.
        width: how many times as large the products of a byte are.
    """
    lengths, num_units = LENGTHS[num_ranks], num_ranks * width
    ffn, hidden = MLP_FFN_PER_RANK * num_units, ATTENTION_HIDDEN_PER_RANK * num_units
    return [
        *(Shape(part="mlp", sequence=length, hidden=MLP_HIDDEN, ffn=ffn) for length in lengths["mlp"]),
        *(Shape(part="attention", sequence=length, hidden=hidden, ffn=0) for length in lengths["attention"]),
    ]


def make_part(shape: Shape, parallel: ModelParallelConfig, env: GlobalEnv) -> Part:
    """The part with random weights, in float32."""
    sizes = TransformerConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.hidden // HEAD_SIZE,
        ffn_hidden_size=shape.ffn or shape.hidden,
        num_layers=1,
        vocab_size=256,
        max_sequence_length=shape.sequence,
    )
    workload = Workload(sequence=shape.sequence, batch=1, dtype="float32")
    if shape.part == "mlp":
        return mlp_part(sizes, parallel, workload, env, feed_forward="gelu")
    return attention_part(sizes, parallel, workload, env)


def tuned(part: Part, parallel: ModelParallelConfig, seconds: float | None) -> MeasuredPlan:
    """What `shiplap tune` finds for the part's layers."""
    conditions = Conditions(
        tensor_parallel=part.env.layout.size("tp"),
        data_parallel=1,
        sequence=part.workload.sequence,
        batch=1,
        dtype="float32",
        device="cpu",
        hardware="",
        ranks_per_host=1,
        threads=1,
        pytorch=torch.__version__,
        shiplap="",
    )
    return tune(
        part.layers.values(),
        parallel,
        conditions=conditions,
        env=part.env,
        settings=TuneSettings(seconds=seconds, compares_kept=True),
        progress=lambda fraction, text: None,
    )


def plan_of(plan: MeasuredPlan, layer: ParallelLayer) -> Plan:
    """The plan of a layer that was measured."""
    found = plan.plan_of(layer)
    assert found is not None
    return found


def kept_plans(part: Part, plan: MeasuredPlan, parallel: ModelParallelConfig) -> dict[str, Plan]:
    """The plan with the gathered input kept, and the backward that was measured as the fastest with it."""
    plans: dict[str, Plan] = {}
    for name, layer in part.layers.items():
        own = plan_of(plan, layer)
        backward = next(one for one in passes_of(plan, part, name) if one.direction == "backward")
        if backward.kept is not None:
            best = candidates(layer, "backward", parallel, keeps="gathered")[backward.kept.method]
            own = with_fields(best, {"forward": own.forward})
        plans[name] = own
    return plans


def passes_of(plan: MeasuredPlan, part: Part, name: str) -> Sequence[MeasuredPass]:
    """What was measured of a layer."""
    return [one for one in plan.passes if part.layers[name].path in one.layers]


def variants(part: Part, plan: MeasuredPlan, parallel: ModelParallelConfig) -> dict[str, Callable[[], float]]:
    """What is timed, by name."""
    sequential = {name: sequential_plan(layer) for name, layer in part.layers.items()}
    sequential_kept = {name: sequential_plan(layer, keeps="gathered") for name, layer in part.layers.items()}
    switches = {name: layer.module.plan for name, layer in part.layers.items()}
    measured = {name: plan_of(plan, layer) for name, layer in part.layers.items()}
    kept = kept_plans(part, plan, parallel)
    peer = seat(PEERS["dtensor"], part)
    assert not isinstance(peer, str), peer

    def under(plans: Mapping[str, Any]) -> Callable[[], float]:
        return lambda: part.milliseconds(plans)

    return {
        "sequential": under(sequential),
        "switches": under(switches),
        "plan": under(measured),
        "sequential, kept": under(sequential_kept),
        "plan, kept": under(kept),
        "DTensor": lambda: part.timed("DTensor", peer),
        "products": part.products_milliseconds,
        "communication": lambda: part.communication_milliseconds(sequential),
        "communication, plan": lambda: part.communication_milliseconds(measured),
    }


def kept_bytes(part: Part, plans: Mapping[str, Plan]) -> int:
    """What forward keeps for backward on this rank, without the parameters: each memory counted once."""
    part.set(plans)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in part.module.parameters()}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        part.module(part.x)
    return sum(found.values())


def measure(shape: Shape, arguments: argparse.Namespace, env: GlobalEnv) -> dict[str, Any]:
    """Tune and time one shape; the same on all ranks."""
    parallel = replace(env.config, tp_comm_overlap=True, tp_comm_overlap_rs_dgrad=True)
    part = make_part(shape, replace(env.config, tp_comm_overlap=True), env)
    begun = time.perf_counter()
    plan = tuned(part, parallel, arguments.tune_seconds)
    tune_s = time.perf_counter() - begun
    timed = variants(part, plan, parallel)
    names = list(timed)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(timed[name]())
    plans = {name: plan_of(plan, layer) for name, layer in part.layers.items()}
    return {
        "part": shape.part,
        "sequence": shape.sequence,
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "tensor_parallel_size": env.layout.size("tp"),
        "link_bits_per_s": int(rate) if (rate := os.environ.get("LINK_RATE_BITS")) else None,
        "tune_s": tune_s,
        "plan": {name: str(one) for name, one in plans.items()},
        "plan_kept": {name: str(one) for name, one in kept_plans(part, plan, parallel).items()},
        "kept_bytes_shard": kept_bytes(part, {n: sequential_plan(one) for n, one in part.layers.items()}),
        "kept_bytes_gathered": kept_bytes(
            part, {n: sequential_plan(one, keeps="gathered") for n, one in part.layers.items()}
        ),
        "times_ms": times,
        "torch": torch.__version__,
    }


def line(record: Mapping[str, Any]) -> str:
    """A shape in a line."""
    times = record["times_ms"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    ideal = max(medians["products"], min(medians["communication"], medians["communication, plan"]))
    to_hide = medians["sequential"] - ideal
    speedup = statistics.median(ratios(times, "sequential", "plan"))
    hidden = (medians["sequential"] - medians["plan"]) / to_hide if to_hide > 0.03 * medians["sequential"] else None
    shape = Shape(**{name: record[name] for name in ("part", "sequence", "hidden", "ffn")})
    return (
        f"{shape!s:<32} comm/comp {medians['communication'] / medians['products']:4.2f}  "
        f"seq {medians['sequential']:7.1f} ms  plan {speedup:4.2f}×  "
        f"hidden {'   -' if hidden is None else f'{hidden:4.0%}'}  "
        f"switches {statistics.median(ratios(times, 'sequential', 'switches')):4.2f}×  "
        f"DTensor/plan {statistics.median(ratios(times, 'DTensor', 'plan')):4.2f}×  "
        f"kept: seq {statistics.median(ratios(times, 'sequential', 'sequential, kept')):4.2f}× "
        f"plan {statistics.median(ratios(times, 'sequential', 'plan, kept')):4.2f}×  tune {record['tune_s']:.0f} s"
    )


def main() -> None:
    """Measure on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="how often each variant runs")
    parser.add_argument("--tune-seconds", type=float, default=None, help="at most, for each shape")
    parser.add_argument("--part", choices=("mlp", "attention"), help="this part only")
    parser.add_argument("--lengths", type=int, nargs="+", help="of the sequences, only these")
    parser.add_argument("--width", type=int, default=1, help="so many times as large an F (MLP) or H (attention)")
    parser.add_argument("--output", type=Path, help="append a line of JSON for each shape")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with joined_world("cpu"):
        env = init_all_env(
            ModelParallelConfig(tensor_parallel_size=int(os.environ["WORLD_SIZE"]), sequence_parallel=True),
            device="cpu",
        )
        for shape in shapes(env.config.tensor_parallel_size, arguments.width):
            is_asked = arguments.part in (None, shape.part)
            if not is_asked or shape.sequence not in (arguments.lengths or [shape.sequence]):
                continue
            record = measure(shape, arguments, env)
            if env.rank == 0:
                print(line(record), flush=True)
                if arguments.output:
                    with arguments.output.open("a") as file:
                        file.write(json.dumps(record) + "\n")
        destroy_all_env()
        # DTensor's meshes hold process groups, whose threads must end before the interpreter does.
        gc.collect()


if __name__ == "__main__":
    main()
