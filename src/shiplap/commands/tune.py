"""`shiplap tune FAMILY`: start local workers, or be one."""

import sys
from collections.abc import Sequence

from shiplap.commands.errors import report
from shiplap.commands.family import split_family
from shiplap.commands.options import parse_config
from shiplap.config.tune import TuneConfig
from shiplap.dist.agreement import AgreedError
from shiplap.dist.axes import layout_for
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.tools.tune import check_output, measure_plan
from shiplap.train.setup import resolve_structure

_DESCRIPTION = (
    "Measure, on these ranks and for this model and run, which overlap is the fastest at each kind of layer, forward "
    "and backward, no overlap among them, and write the plan that `--tp-comm-plan FILE` uses. Takes the options of "
    "`shiplap train`; data is not read."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    split = split_family("tune", _DESCRIPTION, arguments)
    if split is None:
        return 0
    family, flags = split
    config = parse_config(TuneConfig, flags, prog=f"shiplap tune {family}", description=_DESCRIPTION)
    if not under_torchrun():
        return _tune_in_workers(family, config, flags)
    with joined_world(config.run.device):
        try:
            measure_plan(family, config)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    return 0


def _tune_in_workers(family: str, config: TuneConfig, flags: Sequence[str]) -> int:
    """Check here everything that can be checked, so that the user hears of it once and at once; then start workers."""
    num_workers = config.run.nproc or config.parallel.model_parallel_size
    layout_for(config.parallel, num_workers)
    resolve_structure(family, config)
    check_output(config)
    check_devices(config.run.device, num_workers)
    try:
        start_workers(["tune", family, *flags], num_workers)
    except WorkerError as failure:
        # The worker has said already what the user can mend, and that it was interrupted needs no saying.
        if failure.exit_code not in (2, 130):
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
