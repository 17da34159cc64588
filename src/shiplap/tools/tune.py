"""`shiplap tune`: which overlap is the fastest on these ranks, for this model and this run."""

from collections.abc import Iterator
from pathlib import Path

from shiplap.config import UserError
from shiplap.config.option import flags_of
from shiplap.config.tune import TuneConfig
from shiplap.dist.agreement import fail_together
from shiplap.dist.launch import agreed_env
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.site_table import in_bytes
from shiplap.train.setup import resolve_structure
from shiplap.tuning.measured import MeasuredPass, MeasuredPlan
from shiplap.tuning.plan_file import check_writable, write_plan
from shiplap.tuning.progress import showing_progress
from shiplap.tuning.run import conditions_of
from shiplap.tuning.tune import TuneSettings, tune

_HEADER = ("layer", "pass", "method", "ms", "against none", "of", "")


def measure_plan(family: str, config: TuneConfig) -> None:
    """Measure, show and write a plan, as one rank of the job in whose `joined_world` this is called.

    Args:
        family: a key of `shiplap.models.registry.FAMILIES`.
        config: what was asked for.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    settings = {"the model": family} | flags_of(config)
    with agreed_env(config.parallel, device=config.run.device, settings=settings) as env:
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
