"""`shiplap trace FAMILY`: start local workers, or be one."""

import sys
from collections.abc import Sequence

from shiplap.commands.errors import report
from shiplap.commands.family import split_family
from shiplap.commands.options import parse_config
from shiplap.config import UserError
from shiplap.config.trace import TraceConfig
from shiplap.dist import layout_for
from shiplap.dist.agreement import AgreedError
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.train.determinism import check_environment
from shiplap.train.setup import set_up

_DESCRIPTION = (
    "Take a few training steps and record them: a trace for https://ui.perfetto.dev in which every rank has lanes for "
    "products, gathers, scatters and waiting, named by layer; and how much communication is exposed, by layer and by "
    "step. Takes the options of `shiplap train`, and its steps are the first ones of that run."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    split = split_family("trace", _DESCRIPTION, arguments)
    if split is None:
        return 0
    family, flags = split
    config = parse_config(TraceConfig, flags, prog=f"shiplap trace {family}", description=_DESCRIPTION)
    try:
        import matplotlib  # noqa: F401 - before anything runs that would end without its picture
    except ImportError:
        raise UserError("trace draws with matplotlib: pip install 'shiplap[train]'.") from None
    num_workers = config.run.nproc or config.parallel.model_parallel_size
    if under_torchrun() or num_workers == 1:
        return _trace_here(family, config)
    return _trace_in_workers(family, config, flags, num_workers=num_workers)


def _trace_here(family: str, config: TraceConfig) -> int:
    from shiplap.tools.trace import trace

    with joined_world(config.run.device):
        try:
            trace(family, config)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    return 0


def _trace_in_workers(family: str, config: TraceConfig, flags: Sequence[str], *, num_workers: int) -> int:
    """Check here everything that can be checked, so that the user hears of it once and at once; then start workers."""
    from shiplap.tools.trace import claim_trace_folder

    check_environment(config.run)
    set_up(family, config.steps_only(), layout=layout_for(config.parallel, num_workers), data_parallel_rank=0)
    check_devices(config.run.device, num_workers)
    folder = claim_trace_folder(config, family)
    try:
        # Of two --trace-dir the last counts.
        start_workers(["trace", family, *flags, "--trace-dir", str(folder)], num_workers)
    except WorkerError as failure:
        # The worker has said already what the user can mend, and that it was interrupted needs no saying.
        if failure.exit_code not in (2, 130):
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
