"""Measuring what overlap gains. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shiplap.config.option import UserError, check_at_least, option
from shiplap.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How it is measured, and where the files go."""

    bench_rounds: int = option(10, "Rounds: each runs every variant once, in an order that rotates. At least 5.")
    bench_peers: tuple[Literal["dtensor", "none"], ...] = option(
        ("dtensor",), "Others' tensor parallelism that is measured beside ours: dtensor (PyTorch's own), or none."
    )
    bench_dir: str | None = option(None, "Folder for the files. Default: runs/bench-MODEL-DATE-TIME.")
    json: bool = option(False, "Print JSON lines, one for each measurement as in bench.jsonl, instead of tables.")

    def __post_init__(self) -> None:
        """Refuse rounds in which nothing would become clear, and none together with some."""
        check_at_least(self, 5, "bench_rounds")
        if "none" in self.bench_peers and len(self.bench_peers) > 1:
            raise UserError(f"--bench-peers {' '.join(self.bench_peers)}: none, or some? Drop one.")

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of those that are asked for."""
        return tuple(dict.fromkeys(name for name in self.bench_peers if name != "none"))


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TrainConfig):
    """One call of `shiplap bench`: the run that it is about, and how it is measured."""

    bench: BenchOptions = dataclasses.field(default_factory=BenchOptions)

    def __post_init__(self) -> None:
        """Refuse runs in which nothing can overlap."""
        super().__post_init__()
        parallel = self.parallel
        if parallel.pipeline_parallel_size > 1:
            raise UserError(
                f"--pipeline-parallel {parallel.pipeline_parallel_size} is not supported by bench; use 1. What "
                "overlaps is inside a stage: a model of a stage's --num-layers shows the same."
            )
        if parallel.tensor_parallel_size == 1:
            raise UserError(
                "bench measures what hides communication, and with --tensor-parallel 1 there is none. Use "
                "--tensor-parallel 2 or more, --sequence-parallel and --tp-comm-overlap."
            )
        if not parallel.sequence_parallel:
            raise UserError(
                "bench measures what hides communication, and without --sequence-parallel none is hidden. Add it, and "
                "--tp-comm-overlap."
            )
