"""How much memory a rank takes to load its part of a checkpoint: every rank a process of its own.

    .venv/bin/python benchmarks/load_memory.py --output load-memory.jsonl

Writes a LLaMA with random weights into a temporary folder, and loads it with 1, 2, 4 and 8 ranks. A rank samples
`RssAnon` of /proc/self/status, which is the memory that it took itself, every millisecond while it loads; reported is
the highest value less the one before. Pages of the mapped checkpoint, which the kernel takes back when others need
memory, are in `VmHWM` only. Before that each rank loads a tiny checkpoint, so that what Python imports at the first
use does not count. Linux only.
"""

import argparse
import json
import multiprocessing
import platform
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from shiplap import init_all_env
from shiplap.checkpoint import load_huggingface, write_huggingface
from shiplap.checkpoint.pretrained import full_shapes_of
from shiplap.config import TransformerConfig
from shiplap.tensor_parallel.parameters import named_placements

_CONFIG = TransformerConfig(
    vocab_size=32000,
    hidden_size=1024,
    num_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    ffn_hidden_size=4096,
    max_sequence_length=4096,
    tie_embeddings=False,
)
_TINY = replace(_CONFIG, vocab_size=64, hidden_size=64, num_layers=1, ffn_hidden_size=64)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank took. The names are the keys of the JSON lines."""

    tensor_parallel_size: int
    rank: int
    checkpoint_bytes: int
    share_bytes: int
    shard_bytes: int
    largest_shard_bytes: int
    peak_anonymous_growth_bytes: int
    peak_resident_growth_bytes: int

    @property
    def ratio(self) -> float:
        """What was taken in that which must be: the checkpoint's bytes / R."""
        return self.peak_anonymous_growth_bytes / self.share_bytes


def status_bytes(field: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@contextmanager
def peak_anonymous() -> Iterator[list[int]]:
    """Samples `RssAnon`; the list's only element is the highest so far, in bytes."""
    highest = [status_bytes("RssAnon")]
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(0.001):
            highest[0] = max(highest[0], status_bytes("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield highest
    finally:
        stopped.set()
        thread.join()
        highest[0] = max(highest[0], status_bytes("RssAnon"))


def load(rank: int, num_ranks: int, *, store: str, tiny: str, directory: str, results: Connection) -> None:
    """One rank: load, and send what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    group = env.group("tp")
    load_huggingface(tiny, parallel=env.config, group=group)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, resident_before = status_bytes("RssAnon"), status_bytes("VmHWM")
    with peak_anonymous() as highest:
        model = load_huggingface(directory, parallel=env.config, group=group).model
    shard_bytes = [parameter.nbytes for parameter in model.parameters()]
    checkpoint_bytes = sum(4 * prod(placement.full_shape) for _, placement in named_placements(model))
    record = RankRecord(
        tensor_parallel_size=num_ranks,
        rank=rank,
        checkpoint_bytes=checkpoint_bytes,
        share_bytes=checkpoint_bytes // num_ranks,
        shard_bytes=sum(shard_bytes),
        largest_shard_bytes=max(shard_bytes),
        peak_anonymous_growth_bytes=highest[0] - before,
        peak_resident_growth_bytes=status_bytes("VmHWM") - resident_before,
    )
    results.send(record)
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, *, folder: Path) -> list[RankRecord]:
    """Start the ranks, and wait for what they found."""
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        paths = {
            "store": str(folder / f"store-{num_ranks}"),
            "tiny": str(folder / "tiny"),
            "directory": str(folder / "model"),
        }
        process = context.Process(target=load, args=(rank, num_ranks), kwargs={**paths, "results": theirs})
        process.start()
        theirs.close()
        started.append((process, ours))
    records = [results.recv() for _, results in started]
    for process, _ in started:
        process.join()
    return records


def write(directory: Path, config: TransformerConfig, *, dtype: torch.dtype) -> None:
    """A checkpoint with random weights, one parameter at a time."""
    shapes = full_shapes_of("llama3", config)
    tensors = ((name, torch.randn(shape)) for name, shape in shapes.items())
    write_huggingface(str(directory), family="llama3", config=config, dtype=dtype, tensors=tensors)


def table(records: list[RankRecord]) -> str:
    """A rank a line, in MiB."""
    lines = ["TP  rank   N/R   its shards   largest shard   peak anonymous growth   / (N/R)   peak resident growth"]
    for r in records:
        share, shards, largest = (size / _MIB for size in (r.share_bytes, r.shard_bytes, r.largest_shard_bytes))
        growth, resident = (size / _MIB for size in (r.peak_anonymous_growth_bytes, r.peak_resident_growth_bytes))
        lines.append(
            f"{r.tensor_parallel_size:2}  {r.rank:4} {share:5.0f}   {shards:10.1f}   {largest:13.1f}   {growth:21.1f} "
            f"  {r.ratio:7.3f}   {resident:20.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure with every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the files")
    parser.add_argument("--output", type=Path, help="write a JSON line for each rank")
    arguments = parser.parse_args()

    records = []
    with tempfile.TemporaryDirectory(prefix="shiplap-load-") as name:
        folder = Path(name)
        for directory, config in (("model", _CONFIG), ("tiny", _TINY)):
            write(folder / directory, config, dtype=getattr(torch, arguments.dtype))
        for num_ranks in arguments.tensor_parallel:
            records += measure(num_ranks, folder=folder)
    total = records[0].checkpoint_bytes
    print(
        f"N = {total / _MIB:.0f} MiB of float32 parameters, stored as {arguments.dtype}; sizes in MiB\n{table(records)}"
    )
    if arguments.output:
        about = {"dtype": arguments.dtype, "torch": torch.__version__, "machine": platform.machine()}
        arguments.output.write_text("".join(json.dumps(asdict(record) | about) + "\n" for record in records))


if __name__ == "__main__":
    main()
