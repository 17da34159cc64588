"""One MLP, forward and backward: sequential against overlapped against DTensor, interleaved in one run.

Run it on every rank, for example on two hosts with a link of 1 Gbit/s between them:

    sudo scripts/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python benchmarks/mlp.py --output mlp-1gbit.json

One round runs every variant once, in an order that rotates; a variant's time in a round is that of its slowest rank.
Reported are medians, quartiles, and the median of the per-round ratio to sequential. `gemm` is the products alone,
`comm` the collectives of the sequential step alone, `exchange` the same shards moved by send and receive. `chunks` is
`overlap, rs_dgrad` with four chunks a shard; `kept` keeps the gathered x instead of gathering it again.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shiplap import ColumnParallelLinear, GlobalEnv, ModelParallelConfig, RowParallelLinear, init_all_env
from shiplap.dist.collectives import all_gather, batch_send_recv, reduce_scatter
from shiplap.overlap.plan import ColumnPlan, RowPlan

Step = Callable[[], None]


class MLP(nn.Module):
    """FC1, GELU, FC2 in the parallel layers."""

    def __init__(self, hidden: int, ffn: int, config: ModelParallelConfig) -> None:
        """Weights from the default generator, seeded alike on all ranks."""
        super().__init__()
        self.fc1 = ColumnParallelLinear(hidden, ffn, config=config)
        self.fc2 = RowParallelLinear(ffn, hidden, config=config)

    def forward(self, x: Tensor) -> Tensor:
        """`[S/R, H]` to `[S/R, H]`."""
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


def forward_backward(mlp: nn.Module, x: Tensor, dy: Tensor) -> Step:
    """A step that leaves no gradients behind."""

    def step() -> None:
        # DTensor's results may still be on their way; looking at them waits, as the next layer would.
        y = mlp(x)
        y.flatten()[0].item()
        dx, *_ = torch.autograd.grad(y, [x, *mlp.parameters()], dy)
        dx.flatten()[0].item()

    return step


def dtensor_mlp(mlp: MLP) -> nn.Module:
    """The same weights under PyTorch's own tensor and sequence parallelism."""
    env = GlobalEnv.instance()
    assert env.mesh is not None
    hidden, ffn = mlp.fc1.weight.shape[1], mlp.fc1.weight.shape[0] * env.layout.size("tp")
    full = nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallel: nn.Module = parallelize_module(full, env.mesh["tp"], plan)
    for source, target in ((mlp.fc1, parallel[0]), (mlp.fc2, parallel[2])):  # type: ignore[index]
        with torch.no_grad():
            target.weight.to_local().copy_(source.weight)
            target.bias.to_local().copy_(source.bias)
    return parallel


def gemm_only(mlp: MLP, tokens: int) -> Step:
    """The six products and the GELU of a step, on this rank, without communication."""
    w1, w2 = mlp.fc1.weight.detach(), mlp.fc2.weight.detach()
    x = torch.randn(tokens, w1.shape[1])
    inner = torch.randn(tokens, w1.shape[0], requires_grad=True)

    def step() -> None:
        x @ w1.t()
        activated = F.gelu(inner)
        with torch.no_grad():
            y = activated @ w2.t()
            dinner = y @ w2
            y.t() @ activated
        (dh,) = torch.autograd.grad(activated, inner, dinner)
        dh @ w1
        dh.t() @ x

    return step


def comm_only(x: Tensor, tokens: int) -> Step:
    """The collectives of a step: gathers of x, dy and x again, scatters of y and dx."""
    group = GlobalEnv.instance().group("tp")
    full = torch.randn(tokens, x.shape[1])

    def step() -> None:
        for _ in range(3):
            all_gather(x.detach(), group).wait()
        for _ in range(2):
            reduce_scatter(full, group).wait()

    return step


def exchange_only(x: Tensor) -> Step:
    """As many shards each way as `comm_only` moves between two ranks, by send and receive: what the pipelines use."""
    env = GlobalEnv.instance()
    group, size, rank = env.group("tp"), env.layout.size("tp"), env.coordinate("tp")
    assert group is not None
    outgoing, incoming = x.detach(), torch.empty_like(x)

    def step() -> None:
        for _ in range(5):
            for distance in range(1, size):
                to, source = (rank + distance) % size, (rank - distance) % size
                batch_send_recv(outgoing, to, incoming, source, group=group).wait()

    return step


def build_steps(arguments: argparse.Namespace) -> dict[str, Step]:
    """All variants with the same weights and input; checks that they compute the same."""
    env = GlobalEnv.instance()
    sequential = env.config
    overlap = replace(sequential, tp_comm_overlap=True)
    configs = {
        "sequential": sequential,
        "overlap": overlap,
        "overlap, rs_dgrad": replace(overlap, tp_comm_overlap_rs_dgrad=True),
        "sequential, kept": replace(sequential, tp_comm_keep_gathered=True),
        "rs_dgrad, kept": replace(overlap, tp_comm_overlap_rs_dgrad=True, tp_comm_keep_gathered=True),
    }
    mlps: dict[str, nn.Module] = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        mlps[name] = MLP(arguments.hidden, arguments.ffn, config)
    torch.manual_seed(0)
    mlps["chunks"] = chunked = MLP(arguments.hidden, arguments.ffn, overlap)
    chunked.fc1.plan = ColumnPlan(forward="ring:4", dgrad="p2p:4", wgrad="bulk")
    chunked.fc2.plan = RowPlan(forward="p2p:4", dgrad="ring:4")
    reference = mlps["sequential"]
    assert isinstance(reference, MLP)
    mlps["DTensor"] = dtensor_mlp(reference)

    torch.manual_seed(1 + env.rank)
    shard = arguments.sequence // env.layout.size("tp")
    x, dy = torch.randn(shard, arguments.hidden, requires_grad=True), torch.randn(shard, arguments.hidden)
    expected = torch.autograd.grad(reference(x), x, dy)[0]
    for name, mlp in mlps.items():
        difference = (torch.autograd.grad(mlp(x), x, dy)[0] - expected).norm() / expected.norm()
        assert difference < 1e-5, f"{name} computes something else: its dx is off by {difference:.1e}"
    steps = {name: forward_backward(mlp, x, dy) for name, mlp in mlps.items()}
    return steps | {
        "gemm": gemm_only(reference, arguments.sequence),
        "comm": comm_only(x, arguments.sequence),
        "exchange": exchange_only(x),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every variant in every round, the slowest rank's."""
    names = list(steps)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds):
        for offset in range(len(names)):
            name = names[(round_index + offset) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            elapsed = torch.tensor(1e3 * (time.perf_counter() - start))
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            times[name].append(float(elapsed))
    return times


def table(times: dict[str, list[float]]) -> str:
    """A variant a line: median, quartiles, median of the per-round ratio sequential / variant."""
    lines = ["variant              median ms   quartiles ms      sequential/variant"]
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(s / v for s, v in zip(times["sequential"], values, strict=True))
        lines.append(f"{name:<20} {median:9.1f}   {low:6.1f} … {high:6.1f}   {ratio:8.2f}×")
    return "\n".join(lines)


def main() -> None:
    """Measure on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens")
    parser.add_argument("--hidden", type=int, default=1024, help="H")
    parser.add_argument("--ffn", type=int, default=4096, help="F")
    parser.add_argument("--rounds", type=int, default=15, help="how often each variant runs")
    parser.add_argument("--output", type=Path, help="write all times, as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    env = init_all_env(tensor_parallel_size=int(os.environ["WORLD_SIZE"]), sequence_parallel=True, device="cpu")
    times = measure(build_steps(arguments), arguments.rounds)
    if env.rank == 0:
        rate = os.environ.get("LINK_RATE_BITS")
        link = f"{int(rate) / 1e9:g} Gbit/s" if rate else "an unlimited link"
        sizes = f"S={arguments.sequence}, H={arguments.hidden}, F={arguments.ffn}"
        print(
            f"MLP {sizes}, float32, {env.layout.topology()}, {link}, {arguments.rounds} rounds\n{table(times)}",
            flush=True,
        )
        if arguments.output:
            record = {
                "sequence": arguments.sequence,
                "hidden": arguments.hidden,
                "ffn": arguments.ffn,
                "tensor_parallel_size": env.layout.size("tp"),
                "link_bits_per_s": int(rate) if rate else None,
                "torch": torch.__version__,
                "machine": platform.machine(),
                "times_ms": times,
            }
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
