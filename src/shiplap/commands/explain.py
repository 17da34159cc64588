"""`shiplap explain FAMILY`: what overlaps in a training run, without ranks, data or memory for the model."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shiplap.commands.options import parse_run
from shiplap.config import TrainConfig
from shiplap.config.option import option
from shiplap.dist.axes import layout_for
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.site_table import in_bytes, site_table
from shiplap.inspection.sites import Site, sites_of_run
from shiplap.inspection.strict import check_strict
from shiplap.train.setup import resolve_structure
from shiplap.tuning.plan_file import read_plan
from shiplap.tuning.run import given_plan, note

_DESCRIPTION = (
    "Show, for each kind of layer, what it communicates, which matrix product hides that and, where nothing does, why. "
    "Takes the options of `shiplap train`, and starts nothing."
)
_WIDTH = 120
_OF_AUTO = "--tp-comm-plan auto: these are the switches' methods; training measures its own."


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How it is shown."""

    json: bool = option(False, "Print JSON lines, one for each kind of layer and site, instead of a table.")


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(TrainConfig):
    """One call of `shiplap explain`: the run that it is about, and how it is shown."""

    output: ExplainOptions = dataclasses.field(default_factory=ExplainOptions)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    parsed = parse_run(ExplainConfig, arguments, verb="explain", description=_DESCRIPTION)
    if parsed is None:
        return 0
    family, config = parsed
    sites = explain(family, config)
    print(as_json_lines(sites) if config.output.json else as_text(family, config, sites), flush=True)
    # Last, so that the table that says why comes before the error.
    if not config.plan.is_auto:
        check_strict(config.parallel, sites)
    return 0


def explain(family: str, config: TrainConfig) -> list[Site]:
    """Every site of every kind of layer of the model that `shiplap train` would train with the same options.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run.

    Raises:
        UserError: sizes that do not fit together, a checkpoint whose headers cannot be read, or a plan for something
            else.
    """
    model, adapters = resolve_structure(family, config)
    bones = skeleton(family, config, model=model, adapters=adapters)
    plan = given_plan(config, bones, layout_for(config.parallel, config.num_workers))
    if plan is not None:
        plan.apply(bones)
    return sites_of_run(bones, config)


def as_text(family: str, config: TrainConfig, sites: Sequence[Site]) -> str:
    """A heading, the table, and how much of what is sent overlaps; up to 120 columns wide."""
    size, data = config.parallel.tensor_parallel_size, config.data
    tokens = f"{data.batch_size} × {data.sequence_length} tokens"
    if config.parallel.sequence_parallel and data.sequence_length % size:
        tokens += f" (padded to {data.sequence_length + -data.sequence_length % size})"
    sent = sum(site.bytes_per_rank_and_micro_batch for site in sites)
    overlapping = sum(site.bytes_per_rank_and_micro_batch for site in sites if site.hidden_behind is not None)
    topology = f"TP {size}" + (" + SP" if config.parallel.sequence_parallel else "")
    return "\n".join(
        (
            f"{family}, {topology}, {config.run.dtype}, micro-batch of {tokens}",
            "bytes/rank: what each rank sends in one message of one layer",
            "",
            site_table(sites, width=_WIDTH),
            "",
            f"{in_bytes(overlapping)} of {in_bytes(sent)} sent by each rank in a micro-batch overlap with a product.",
            *_about_the_plan(config),
        )
    )


def _about_the_plan(config: TrainConfig) -> list[str]:
    if config.plan.tp_comm_plan is None:
        return []
    if config.plan.is_auto:
        return [_OF_AUTO]
    lines = note(read_plan(Path(config.plan.tp_comm_plan)), None).splitlines()
    wrapped = (textwrap.wrap(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False) for line in lines)
    return [line for several in wrapped for line in several]


def as_json_lines(sites: Sequence[Site]) -> str:
    """One object a line, with the attributes of `Site` for keys."""
    return "\n".join(
        json.dumps(
            dataclasses.asdict(site) | {"bytes_per_rank_and_micro_batch": site.bytes_per_rank_and_micro_batch},
            ensure_ascii=False,
        )
        for site in sites
    )
