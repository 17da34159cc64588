"""`shiplap trace FAMILY`."""

from collections.abc import Sequence
from functools import partial

from shiplap.commands.options import parse_run, require_matplotlib
from shiplap.commands.run_on_ranks import run_on_ranks
from shiplap.dist import layout_for
from shiplap.tools.trace.options import TraceConfig
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
        UserError: a user error.
    """
    parsed = parse_run(TraceConfig, arguments, verb="trace", description=_DESCRIPTION)
    if parsed is None:
        return 0
    family, config = parsed
    require_matplotlib("trace")
    from shiplap.tools.trace.run import claim_trace_folder, trace  # draws with matplotlib

    def check() -> None:
        check_environment(config.run)
        layout = layout_for(config.parallel, config.num_workers)
        set_up(family, config.steps_only(), layout=layout, data_parallel_rank=0)

    return run_on_ranks(
        ["trace", *arguments],
        num_workers=config.num_workers,
        device=config.run.device,
        here=partial(trace, family, config),
        check=check,
        claim=lambda: ["--trace-dir", str(claim_trace_folder(config, family))],
    )
