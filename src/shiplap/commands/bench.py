"""`shiplap bench FAMILY`."""

from collections.abc import Sequence
from functools import partial

from shiplap.commands.options import parse_run, require_matplotlib
from shiplap.commands.run_on_ranks import run_on_ranks
from shiplap.dist import layout_for
from shiplap.tools.bench.options import BenchConfig
from shiplap.train.determinism import check_environment

_DESCRIPTION = (
    "Measure what overlap gains on these ranks, with this model's shapes: each pass of each kind of layer under every "
    "method, and whole parts of a block, against nothing overlapped, against products and communication alone, and "
    "against PyTorch's DTensor. Takes the options of `shiplap train`, and needs no data."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    parsed = parse_run(BenchConfig, arguments, verb="bench", description=_DESCRIPTION)
    if parsed is None:
        return 0
    family, config = parsed
    require_matplotlib("bench")
    from shiplap.tools.bench.run import bare_model, bench, claim_bench_folder  # draws with matplotlib

    def check() -> None:
        layout_for(config.parallel, config.num_workers)
        check_environment(config.run)
        bare_model(family, config, rank=0)

    return run_on_ranks(
        ["bench", *arguments],
        num_workers=config.num_workers,
        device=config.run.device,
        here=partial(bench, family, config),
        check=check,
        claim=lambda: ["--bench-dir", str(claim_bench_folder(config, family))],
    )
