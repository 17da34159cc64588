"""`shiplap tune FAMILY`: which overlap is the fastest on these ranks, for this model and this run."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shiplap.commands.options import parse_run
from shiplap.commands.run_on_ranks import run_on_ranks
from shiplap.config import TrainConfig, UserError
from shiplap.config.option import check_at_least, option
from shiplap.dist.agreement import fail_together
from shiplap.dist.axes import layout_for
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.site_table import in_bytes
from shiplap.train.determinism import check_environment
from shiplap.train.setup import joined_run, resolve_structure
from shiplap.tuning.measured import MeasuredPass, MeasuredPlan
from shiplap.tuning.plan_file import check_writable, write_plan
from shiplap.tuning.progress import showing_progress
from shiplap.tuning.run import conditions_of
from shiplap.tuning.tune import TuneSettings, tune

_DESCRIPTION = (
    "Measure, on these ranks and for this model and run, which overlap is the fastest at each kind of layer, forward "
    "and backward, no overlap among them, and write the plan that `--tp-comm-plan FILE` uses. Takes the options of "
    "`shiplap train`; data is not read."
)
_HEADER = ("layer", "pass", "method", "ms", "against none", "of", "")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How it is measured, and where the plan goes."""

    output: str = option("plan.json", "File for the plan, which `--tp-comm-plan FILE` uses. It is replaced.")
    seconds: float | None = option(
        None,
        "At most so many seconds of measuring. Default: until every choice is clear, or 20 rounds and 5 seconds of a "
        "pass are over; where nothing is clearly faster than no overlap, it is then measured alone with the best.",
    )
    keep_fastest: bool = option(
        False,
        "Let Column layers keep their gathered input where that is clearly faster, whatever the memory. Otherwise what "
        "it would save and cost is only shown.",
    )
    exhaustive: bool = option(
        False, "Measure every method in all of 60 rounds, also those that are clearly slower: to check the choice."
    )

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        check_at_least(self, 1, "seconds")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(TrainConfig):
    """One call of `shiplap tune`: the run that it is for, and how it is measured."""

    tune: TuneOptions = dataclasses.field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        """Refuse a run in which nothing could overlap."""
        super().__post_init__()
        if not self.parallel.tp_comm_overlap:
            raise UserError(
                "tune measures what may overlap, so it needs --tp-comm-overlap (and --sequence-parallel, "
                "--tensor-parallel > 1). Switches that are off, such as --tp-comm-overlap-rs-dgrad, are not measured."
            )
        if self.plan.tp_comm_plan is not None:
            raise UserError(f"tune makes a plan; --tp-comm-plan {self.plan.tp_comm_plan} is for runs that use one.")


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    parsed = parse_run(TuneConfig, arguments, verb="tune", description=_DESCRIPTION)
    if parsed is None:
        return 0
    family, config = parsed
    return run_on_ranks(
        ["tune", *arguments],
        num_workers=config.num_workers,
        device=config.run.device,
        here=partial(measure_plan, family, config),
        check=partial(_check, family, config),
    )


def _check(family: str, config: TuneConfig) -> None:
    layout_for(config.parallel, config.num_workers)
    check_environment(config.run)
    resolve_structure(family, config)
    check_output(config)


def measure_plan(family: str, config: TuneConfig) -> None:
    """Measure, show and write a plan, as one rank of the job in whose `joined_world` this is called.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: what was asked for.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    with joined_run(family, config) as env:
        with fail_together():
            if env.rank == 0:
                check_output(config)
            model, adapters = resolve_structure(family, config)
            bones = skeleton(family, config, model=model, adapters=adapters, rank=env.coordinate("tp"))
        if env.rank == 0:
            print(env.overview(), flush=True)
        with showing_progress("tune", is_shown=env.rank == 0) as progress:
            plan = tune(
                parallel_layers(bones),
                config.parallel,
                conditions=conditions_of(config, env.layout),
                env=env,
                settings=TuneSettings(
                    seconds=config.tune.seconds,
                    compares_kept=True,
                    takes_kept=config.tune.keep_fastest,
                    is_exhaustive=config.tune.exhaustive,
                ),
                progress=progress,
            )
        with fail_together():
            if env.rank == 0:
                # First, so that what took so long is seen if it cannot be written.
                print(as_text(plan, config), flush=True)
                write_plan(plan, Path(config.tune.output))
                print(f"plan written: {config.tune.output}", flush=True)


def check_output(config: TuneConfig) -> None:
    """Refuse a place for the plan that is none, before anything is measured.

    Raises:
        UserError: naming the flag.
    """
    try:
        check_writable(Path(config.tune.output))
    except UserError as error:
        raise UserError(f"--output {error}") from None


def as_text(plan: MeasuredPlan, config: TuneConfig) -> str:
    """A table with a line for each pass, and what follows from it."""
    rows = [_HEADER, *(_row(measured) for measured in plan.passes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join((*lines, "", *_remarks(plan, config)))


def _row(measured: MeasuredPass) -> tuple[str, ...]:
    timing = measured.timings[measured.method]
    return (
        " ".join(measured.layers),
        measured.direction,
        measured.method,
        f"{timing.median_ms:.2f}",
        f"{measured.speedup:.2f}×",
        f"{len(measured.timings)}",
        "" if measured.is_clear else "not clear",
    )


def _remarks(plan: MeasuredPlan, config: TuneConfig) -> Iterator[str]:
    for measured in plan.passes:
        kept = measured.kept
        if kept is not None:
            layers = " ".join(measured.layers)
            verdict = f"{kept.speedup:.2f}× as fast" if kept.is_clear else "as fast, as far as can be seen,"
            yield (
                f"{layers}: with the gathered input kept, backward is {verdict} ({kept.method}), "
                f"for {in_bytes(kept.memory_bytes)} more on each rank, layer and micro-batch"
            )
    if not config.parallel.tp_comm_overlap_rs_dgrad:
        yield "--tp-comm-overlap-rs-dgrad is off, so no pipeline of dgrad and its reduce-scatter was measured"
    if any(not measured.is_clear for measured in plan.passes):
        yield "not clear: the machine is too noisy, or --seconds too few; what is not clear does not overlap"
