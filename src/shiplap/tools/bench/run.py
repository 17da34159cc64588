"""One rank's part of measuring, and what the first rank writes and shows of it."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shiplap.config import TrainConfig, UserError
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.dist.hardware import device_name
from shiplap.inspection.layers import ParallelLayer
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.inspection.strict import check_strict
from shiplap.models.decoder import DecoderModel
from shiplap.tools.bench.figure import draw
from shiplap.tools.bench.layers import PlanOf, layer_kinds, layer_subjects
from shiplap.tools.bench.options import BenchConfig
from shiplap.tools.bench.parts import block_kinds, part_subjects
from shiplap.tools.bench.result import Result
from shiplap.tools.bench.subject import SEQUENTIAL, Subject, measure
from shiplap.tools.bench.table import tables
from shiplap.train.folders import claim_run_folder
from shiplap.train.setup import joined_run, resolve_structure
from shiplap.tuning.candidates import Plan
from shiplap.tuning.measured import MeasuredPlan
from shiplap.tuning.probe import Workload, slowest_rank
from shiplap.tuning.progress import showing_progress
from shiplap.tuning.run import check_same_plan, conditions_of, found_or_measured, given_plan
from shiplap.tuning.tune import Progress

_PARTS = 3
"""Of a block: attention, feed-forward layer, and all of it."""


def bench(family: str, config: BenchConfig) -> None:
    """Measure, as one rank of the job in whose `joined_world` this is called.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run that it is about, and how it is measured.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    with joined_run(family, config) as env:
        with fail_together():
            bones = bare_model(family, config, rank=env.coordinate("tp"))
        with showing_progress("measured plan", is_shown=env.rank == 0) as progress:
            plan = _plan(config, bones, env, progress)
        # Only now: what some rank cannot begin leaves no folder behind.
        with fail_together():
            folder = claim_bench_folder(config, family) if env.rank == 0 else None
        headline = _headline(family, config, env)
        if folder is not None and not config.bench.json:
            print(f"{env.overview()}\n{headline}", flush=True)
        with showing_progress("bench", is_shown=env.rank == 0) as progress:
            results = _Bench(config=config, model=bones, env=env, plan=plan, progress=progress).results()
        with fail_together():
            if folder is not None:
                lines = _json_lines(results, _context(family, config, env))
                _write(folder, lines, results, title=headline)
                print(f"\n{tables(results)}\n\nbench folder: {folder}" if not config.bench.json else lines, flush=True)


def claim_bench_folder(config: BenchConfig, family: str) -> Path:
    """Make the folder that `--bench-dir` names, or a new one.

    Raises:
        UserError: the folder cannot be made, or not be written to.
    """
    return claim_run_folder(config.bench.bench_dir, f"bench-{family}", flag="--bench-dir")


def bare_model(family: str, config: TrainConfig, *, rank: int) -> DecoderModel:
    """A rank's shard of the run's model, without memory. Communicates nothing.

    Raises:
        UserError: sizes that do not fit together, or switches that --tp-comm-strict refuses.
    """
    model, adapters = resolve_structure(family, config)
    bones = skeleton(family, config, model=model, adapters=adapters, rank=rank)
    check_strict(config.parallel, sites_of_run(bones, config))
    return bones


def _plan(config: TrainConfig, bones: DecoderModel, env: GlobalEnv, progress: Progress) -> MeasuredPlan | None:
    """The run's measured plan, if it has one: read, found, or measured now."""
    if config.plan.is_auto:
        return found_or_measured(config, bones, env, progress)
    with fail_together():
        plan = given_plan(config, bones, env.layout)
    check_same_plan(config, plan)
    return plan


@dataclass(kw_only=True)
class _Bench:
    """Everything that is measured."""

    config: BenchConfig
    model: DecoderModel
    env: GlobalEnv
    plan: MeasuredPlan | None
    progress: Progress
    _num_done: int = 0
    _begun: float = 0.0

    def results(self) -> list[Result]:
        """Of all passes of all kinds of layers, and of all parts of all kinds of blocks."""
        self._begun = time.perf_counter()
        kinds, workload = layer_kinds(self.model), self._workload
        total = sum(len(kind.directions) for kind in kinds) + _PARTS * len(block_kinds(self.model))
        found = [
            (kind, direction, self._measure(subject, total))
            for kind, direction, subject in layer_subjects(
                kinds, self.env, workload=workload, parallel=self.config.parallel, plan_of=self._plan_of
            )
        ]
        parts = [
            self._measure(subject, total)
            for subject in part_subjects(
                self.model,
                self.env,
                workload=workload,
                found=found,
                plan_of=self._plan_of,
                peers=self.config.bench.peers,
            )
        ]
        return [*(result for _, _, result in found), *parts]

    @property
    def _workload(self) -> Workload:
        return conditions_of(self.config, self.env.layout).workload

    @property
    def _plan_of(self) -> PlanOf | None:
        plan = self.plan
        if plan is None:
            return None

        def plan_of(layer: ParallelLayer) -> Plan:
            found = plan.plan_of(layer)
            assert found is not None, "the plan was checked"
            return found

        return plan_of

    def _measure(self, subject: Subject, total: int) -> Result:
        self.progress(self._num_done / total, f"{subject.title} {subject.direction}: {len(subject.variants)} variants")
        samples = measure(subject, self.config.bench.bench_rounds)
        # Without the variants, which hold the layer or part that was measured: its memory is needed for the next one.
        result = Result(subject=replace(subject, variants={}), samples=samples)
        self._num_done += 1
        seconds = slowest_rank(time.perf_counter() - self._begun, self.env)
        fastest = result.fastest
        method = f" {result.method(fastest)}" if subject.what == "layer" else " methods"
        self.progress(
            self._num_done / total,
            f"{subject.title} {subject.direction}: {result.median_ms(SEQUENTIAL):.3g} ms without overlap, fastest"
            f"{method} {result.speedup(fastest):.2f}×; {seconds:.0f} s so far",
        )
        return result


def _headline(family: str, config: BenchConfig, env: GlobalEnv) -> str:
    size, data = config.parallel.tensor_parallel_size, config.data
    tokens = f"{data.batch_size} × {data.sequence_length} tokens"
    if data.sequence_length % size:
        tokens += f" (padded to {data.sequence_length + -data.sequence_length % size})"
    preset = config.model.preset or family
    lines = [
        f"{preset}, TP {size} + SP, {config.run.dtype}, micro-batch of {tokens}",
        f"{device_name(env.device)}, PyTorch {torch.__version__}, {config.bench.bench_rounds} rounds",
    ]
    if not config.parallel.tp_comm_overlap:
        lines.append("--tp-comm-overlap is off: no method is measured that overlaps anything.")
    return "\n".join(lines)


def _context(family: str, config: BenchConfig, env: GlobalEnv) -> dict[str, object]:
    """What is the same for all measurements."""
    return {
        "family": family,
        "tensor_parallel_size": env.layout.size("tp"),
        "data_parallel_size": env.layout.size("dp"),
        "batch_size": config.data.batch_size,
        "sequence_tokens": conditions_of(config, env.layout).sequence,
        "dtype": config.run.dtype,
        "device": env.device.type,
        "device_name": device_name(env.device),
        "torch_version": torch.__version__,
    }


def _json_lines(results: Sequence[Result], context: dict[str, object]) -> str:
    return "\n".join(
        json.dumps(record | context, ensure_ascii=False) for result in results for record in result.records()
    )


def _write(folder: Path, lines: str, results: Sequence[Result], *, title: str) -> None:
    """Write the files.

    Raises:
        UserError: one cannot be written.
    """
    first, *others = title.split("\n")
    try:
        (folder / "bench.jsonl").write_text(lines + "\n", encoding="utf-8")
        draw(folder / "bench.png", results, title=first, subtitle="\n".join(others))
    except OSError as error:
        raise UserError(
            f"--bench-dir {folder}: cannot write there: {error.strerror} ({error.filename}). Name a folder with room "
            "that can be written to."
        ) from None
