r"""What do paced transfers gain? By themselves, and under the products of an attention block or an MLP.

Run it on every rank; with two, no transfers can meet:

    sudo scripts/hosts.py --hosts 4 --rate 169mbit --offload -- \
        .venv/bin/python benchmarks/pacing.py --part attention --sequence 256

Variants run once a round, in an order that rotates; a variant's time in a round is that of its slowest rank. Transfers
are told as multiples of the time that their bytes take on the link.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from sweep import make_part, shapes

from shiplap import GlobalEnv, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.dist.collectives import MAX, Handle, RankGroup, all_gather, all_reduce, reduce_scatter, send_to_each
from shiplap.dist.launch import joined_world
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.tuning.candidates import Plan, sequential_plan
from shiplap.tuning.parts import Part

NUM_PIECES = 8
Timed = Mapping[str, Callable[[], float]]


def transfers(group: RankGroup, num_bytes: int) -> Timed:
    """Every rank sends each other one so many bytes of its own, or gets their sum, with nothing to compute."""
    shards = [torch.randn(num_bytes // 4) for _ in range(group.size)]
    pieces = list(zip(*(shard.chunk(NUM_PIECES) for shard in shards), strict=True))

    def sends(ranks: RankGroup, outgoing: Sequence[Sequence[torch.Tensor]]) -> list[Handle]:
        return [pending for some in outgoing for pending in send_to_each(some, group=ranks).values()]

    starts: dict[str, Callable[[], list[Handle]]] = {
        "all-gather": lambda: [all_gather(shards[0], group)],
        "reduce-scatter": lambda: [reduce_scatter(torch.cat(shards), group)],
        "sends": lambda: sends(group, [shards]),
        "paced sends": lambda: sends(group.paced, [shards]),
        f"sends in {NUM_PIECES} pieces": lambda: sends(group, pieces),
        f"paced sends in {NUM_PIECES} pieces": lambda: sends(group.paced, pieces),
    }

    def timed(start: Callable[[], list[Handle]]) -> float:
        all_reduce(torch.zeros(1), group).wait()
        begun = time.perf_counter()
        for pending in start():
            pending.wait()
        return float(all_reduce(torch.tensor(1e3 * (time.perf_counter() - begun)), group, MAX).wait())

    return {name: lambda start=start: timed(start) for name, start in starts.items()}  # type: ignore[misc]


def plans(part: Part) -> dict[str, dict[str, Plan]]:
    """By columns and by rows, with sends that all start at once and paced; the part is a Column and a Row layer."""
    column, row = part.layers
    by_columns = ColumnPlan(forward="feature_chunks:8", dgrad="feature_chunks", wgrad="bulk_p2p")
    by_rows = ColumnPlan(forward="shards_per_gemm", dgrad="p2p", wgrad="bulk_p2p")
    at_once: dict[str, dict[str, Plan]] = {
        "by columns": {
            column: by_columns,
            row: RowPlan(forward="feature_chunks:8", dgrad="feature_chunks:8", wgrad="parts"),
        },
        "by rows": {column: by_rows, row: RowPlan(forward="p2p", dgrad="shards_per_gemm", wgrad="parts")},
    }
    return {
        f"{name}{', paced' * is_paced}": {layer: paced(plan) if is_paced else plan for layer, plan in of_layers.items()}
        for name, of_layers in at_once.items()
        for is_paced in (False, True)
    }


def paced(plan: Plan) -> Plan:
    """The same, with paced transfers."""
    sites = ("forward", "dgrad", "wgrad") if isinstance(plan, ColumnPlan) else ("forward", "dgrad")
    changed: Plan = replace(plan, **{site: replace(getattr(plan, site), paced=True) for site in sites})
    return changed


def variants(part: Part) -> Timed:
    """Forward and backward of the part, and what bounds them."""
    sequential = {name: sequential_plan(layer) for name, layer in part.layers.items()}
    return {
        "products": part.products_milliseconds,
        "communication": lambda: part.communication_milliseconds(sequential),
        "sequential": lambda: part.milliseconds(sequential),
        **{name: lambda of=of: part.milliseconds(of) for name, of in plans(part).items()},  # type: ignore[misc]
    }


def measure(timed: Timed, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by variant, round by round."""
    names = list(timed)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(timed[name]())
    return times


def report(title: str, times: Mapping[str, Sequence[float]], unit_ms: float, unit: str) -> None:
    """Medians and quartiles, over the unit."""
    print(title, flush=True)
    for name, values in times.items():
        low, middle, high = statistics.quantiles([value / unit_ms for value in values], n=4)
        print(f"  {name:<28} {statistics.median(values):8.1f} ms  {middle:5.2f} ({low:.2f} … {high:.2f}) {unit}")


def run(arguments: argparse.Namespace, env: GlobalEnv) -> None:
    """Measure both on this rank; rank 0 reports."""
    group = env.group("tp")
    assert group is not None, "this needs several ranks"
    rate = float(os.environ["LINK_RATE_BITS"])
    for num_bytes in arguments.bytes:
        times = measure(transfers(group, num_bytes), arguments.rounds)
        if env.rank == 0:
            wire_ms = 1e3 * 8 * num_bytes * (group.size - 1) / rate
            report(f"{num_bytes} bytes to each rank", times, wire_ms, "of the bytes' time")
    shape = next(
        one
        for one in shapes(group.size, arguments.width)
        if (one.part, one.sequence) == (arguments.part, arguments.sequence)
    )
    times = measure(variants(make_part(shape, replace(env.config, tp_comm_overlap=True), env)), arguments.rounds)
    if env.rank == 0:
        report(str(shape), times, statistics.median(times["sequential"]), "of sequential")


def main() -> None:
    """Parse, join the other ranks, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("mlp", "attention"), default="attention")
    parser.add_argument("--sequence", type=int, default=256, help="one of the lengths of sweep.py")
    parser.add_argument("--width", type=int, default=1, help="as in sweep.py")
    parser.add_argument("--bytes", type=int, nargs="+", default=[200_000, 1_600_000], help="of the transfers alone")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with joined_world("cpu"):
        size = int(os.environ["WORLD_SIZE"])
        env = init_all_env(ModelParallelConfig(tensor_parallel_size=size, sequence_parallel=True), device="cpu")
        run(arguments, env)
        destroy_all_env()
        gc.collect()


if __name__ == "__main__":
    main()
