"""One rank's part of a traced run, and what the first rank writes and shows of all."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shiplap.config import UserError
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together, gather_texts
from shiplap.dist.hooks import observing
from shiplap.models.decoder import DecoderModel
from shiplap.tools.trace.chart import draw
from shiplap.tools.trace.chrome import chrome_trace
from shiplap.tools.trace.clocks import Clocks, compare_clocks
from shiplap.tools.trace.device import device_slices
from shiplap.tools.trace.exposure import StepExposure, mean_rows, mean_step, site_exposures, step_exposures
from shiplap.tools.trace.layers import layer_kinds, telling_modules
from shiplap.tools.trace.options import TraceConfig
from shiplap.tools.trace.recorder import Recorder
from shiplap.tools.trace.slices import RankTrace, host_slices, rank_trace
from shiplap.tools.trace.table import exposure_table
from shiplap.tools.trace.watchers import Watchers
from shiplap.train.folders import claim_run_folder
from shiplap.train.model import describe, make_model
from shiplap.train.setup import Setup, joined_run, set_up, with_plan
from shiplap.train.trainer import new_step, read_step

_logger = logging.getLogger(__name__)
PROFILE = "profiler-rank0.json"


def trace(family: str, config: TraceConfig) -> None:
    """Trace a run, as one rank of the job in whose `joined_world` this is called, or as a single process.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run, and which of its steps.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    with joined_run(family, config) as env:
        with fail_together():
            setup = set_up(family, config.steps_only(), layout=env.layout, data_parallel_rank=env.data_rank)
        setup = with_plan(setup, env)
        # Only now: a run that some rank cannot begin leaves no folder behind.
        with fail_together():
            folder = claim_trace_folder(config, family) if env.rank == 0 else None
        model = make_model(setup, env)
        if folder is not None:
            _say(_headline(setup, model, env, config))
        traced = _TracedRun(config=config, setup=setup, env=env, model=model, folder=folder)
        own, losses = traced.run()
        with fail_together():
            _check_seen(own, env)
        clocks = compare_clocks()
        ranks = [RankTrace.from_text(text) for text in gather_texts(own.to_text())]
        with fail_together():
            if folder is not None:
                moved = [rank.moved(offset) for rank, offset in zip(ranks, clocks.offsets_ns, strict=True)]
                _write(folder, setup, env, traced=moved, losses=losses, clocks=clocks)


def claim_trace_folder(config: TraceConfig, family: str) -> Path:
    """Make the folder that `--trace-dir` names, or a new one.

    Raises:
        UserError: the folder cannot be made, or not be written to.
    """
    return claim_run_folder(config.trace.trace_dir, f"trace-{family}", flag="--trace-dir")


def _check_seen(own: RankTrace, env: GlobalEnv) -> None:
    """Refuse to show an empty device as one that does nothing."""
    if env.device.type == "cuda" and not any(item.lane == "GEMM" for item in own.slices):
        raise UserError(
            f"--device cuda: PyTorch {torch.__version__}'s profiler saw no products on {env.device}. Another profiler, "
            "such as Nsight, may hold CUPTI, or this build of PyTorch may lack it."
        )


def _say(text: str) -> None:
    print(text, flush=True)


def _headline(setup: Setup, model: DecoderModel, env: GlobalEnv, config: TraceConfig) -> str:
    lines = [env.overview(), describe(setup, model)]
    if ignored := config.ignored():
        lines.append(f"Nothing comes between the steps of a trace: {', '.join(ignored)} does nothing here.")
    if env.layout.size("tp") == 1:
        lines.append("TP 1: there is no tensor-parallel communication to show, only what is computed.")
    if env.layout.size("dp") > 1 and env.device.type == "cpu":
        lines.append(
            f"DP {env.layout.size('dp')}: PyTorch sums gradients over the replicas itself, which is not recorded."
        )
    lines.append(f"warm-up steps: {config.trace.trace_warmup}, traced steps: {config.trace.trace_steps}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _TracedRun:
    config: TraceConfig
    setup: Setup
    env: GlobalEnv
    model: DecoderModel
    folder: Path | None

    def run(self) -> tuple[RankTrace, dict[int, float]]:
        """Take all steps; what this rank recorded of the traced ones, and the loss of each."""
        is_cuda, options = self.env.device.type == "cuda", self.config.trace
        watchers = None if is_cuda else Watchers()
        recorder = Recorder(layer_kinds(self.model), watchers=watchers)
        take_step = new_step(self.setup, self.model, self.env)
        losses: dict[int, float] = {}
        with ExitStack() as stack:
            profiled = _Profiled(self, stack)
            for step in range(options.num_steps):
                if step == options.trace_warmup - 1:
                    # The last step to warm up is recorded and profiled too, and then left out.
                    profiled.start(options.trace_steps)
                    stack.enter_context(observing(recorder))
                    stack.enter_context(telling_modules(self.model, take_step.optimizer, recorder))
                started = time.perf_counter()
                with recorder.step(step + 1):
                    result = take_step(step, read_step(self.setup, step, self.env))
                milliseconds = 1000 * (time.perf_counter() - started)
                profiled.step_is_done()
                losses[step + 1] = result.loss
                if self.env.rank == 0:
                    what = "traced" if step >= options.trace_warmup else "warm-up"
                    _say(
                        f"step {step + 1}/{options.num_steps} | {what} | train loss {result.loss:.4f} | "
                        f"{milliseconds:.1f} ms"
                    )
        spans = recorder.spans()
        if watchers is not None:
            watchers.close()
        steps = [span for span in spans if span.kind == "step"][-options.trace_steps :]
        slices = host_slices(spans) if not is_cuda else device_slices(profiled.result, spans)
        return rank_trace(slices, steps, options.trace_warmup + 1), losses


class _Profiled:
    """PyTorch's profiler. On every rank, so that it delays them alike; its result is kept of the first."""

    def __init__(self, run: _TracedRun, stack: ExitStack) -> None:
        """Not started; ended with `stack`."""
        self._is_cuda = run.env.device.type == "cuda"
        self._folder = run.folder
        self._stack = stack
        self._profile: profile | None = None
        self.result: dict[str, Any] = {}
        """On CUDA, what it wrote."""

    def start(self, num_steps: int) -> None:
        """Warm up in the next step, then profile so many."""
        # Before its first use, when it reads this: it would report its stages on the standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._keep,
            # There is one cycle. PyTorch 2.11 warns that events of earlier ones would be lost.
            acc_events=True,
        )
        self._stack.enter_context(self._profile)

    def step_is_done(self) -> None:
        """After every step."""
        if self._profile is not None:
            self._profile.step()

    def _keep(self, finished: profile) -> None:
        with tempfile.TemporaryDirectory(prefix="shiplap-trace-") as own:
            path = (Path(own) if self._folder is None else self._folder) / PROFILE
            if self._folder is not None or self._is_cuda:
                finished.export_chrome_trace(str(path))
            if self._is_cuda:
                self.result = json.loads(path.read_text(encoding="utf-8"))


def _write(
    folder: Path,
    setup: Setup,
    env: GlobalEnv,
    *,
    traced: Sequence[RankTrace],
    losses: dict[int, float],
    clocks: Clocks,
) -> None:
    """Write everything but the profiler's own file, and show the table.

    Raises:
        UserError: a file cannot be written.
    """
    steps, sites = step_exposures(traced, losses), site_exposures(traced)
    num_steps = len(traced[0].step_ms)
    rows = mean_rows(sites, num_ranks=len(traced), num_steps=num_steps)
    topology = env.layout.topology() + (" + SP" if setup.config.parallel.sequence_parallel else "")
    title = f"Exposed communication: {setup.family}, {topology}, {setup.config.run.dtype}, {setup.config.run.device}"
    notes = {"clocks": clocks.in_words(), "run": title, "lanes from": _source(setup)}
    content = chrome_trace(traced, [env.layout.rank_name(rank) for rank in range(len(traced))], notes)
    try:
        (folder / "trace.json").write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        lines = [json.dumps(asdict(item)) for items in (steps, sites) for item in items]
        (folder / "exposed.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        draw(folder / "exposed.png", rows, steps, title=title)
    except OSError as error:
        raise UserError(
            f"--trace-dir {folder}: cannot write there: {error.strerror} ({error.filename}). Name a folder with room "
            "that can be written to."
        ) from None
    _say(_summary(folder, exposure_table(rows, mean_step(steps)), steps, clocks))


def _source(setup: Setup) -> str:
    if setup.config.run.device == "cuda":
        return "kernels as PyTorch's profiler saw them on the device; waiting is a stream that stands still"
    return "the host's clock; waiting is a host that is blocked"


def _summary(folder: Path, table: str, steps: Sequence[StepExposure], clocks: Clocks) -> str:
    mean = mean_step(steps)
    lines = ["", "exposed communication by layer and site, ms a step: mean over ranks and traced steps", "", table, ""]
    if mean.communication_ms == 0:
        lines = ["", "no communication: one rank does everything"]
    return "\n".join(
        [
            *lines,
            f"exposed communication: {mean.exposed_ms:.2f} ms of a step's {mean.step_ms:.1f} ms "
            f"({mean.exposed_percent:.1f} %), profiling included; {clocks.in_words()}",
            f"written: {folder}/trace.json (open it in https://ui.perfetto.dev), exposed.jsonl, exposed.png, {PROFILE}",
        ]
    )
