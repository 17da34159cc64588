"""`shiplap bench FAMILY`: start local workers, or be one."""

import sys
from collections.abc import Sequence

from shiplap.commands.errors import report
from shiplap.commands.family import split_family
from shiplap.commands.options import parse_config
from shiplap.config import UserError
from shiplap.config.bench import BenchConfig
from shiplap.dist import layout_for
from shiplap.dist.agreement import AgreedError
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.train.determinism import check_environment

_DESCRIPTION = (
    "Measure what overlap gains on these ranks, with this model's shapes: each pass of each kind of layer under every "
    "method, and whole parts of a block, against nothing overlapped, against products and communication alone, and "
    "against PyTorch's DTensor. Takes the options of `shiplap train`, and needs no data."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    split = split_family("bench", _DESCRIPTION, arguments)
    if split is None:
        return 0
    family, flags = split
    config = parse_config(BenchConfig, flags, prog=f"shiplap bench {family}", description=_DESCRIPTION)
    try:
        import matplotlib  # noqa: F401 - before anything is measured that would end without its picture
    except ImportError:
        raise UserError("bench draws with matplotlib: pip install 'shiplap[train]'.") from None
    if under_torchrun():
        return _bench_here(family, config)
    return _bench_in_workers(family, config, flags)


def _bench_here(family: str, config: BenchConfig) -> int:
    from shiplap.tools.bench import bench

    with joined_world(config.run.device):
        try:
            bench(family, config)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    return 0


def _bench_in_workers(family: str, config: BenchConfig, flags: Sequence[str]) -> int:
    """Check here everything that can be checked, so that the user hears of it once and at once; then start workers."""
    from shiplap.tools.bench import bare_model, claim_bench_folder

    num_workers = config.run.nproc or config.parallel.model_parallel_size
    layout_for(config.parallel, num_workers)
    check_environment(config.run)
    bare_model(family, config, rank=0)
    check_devices(config.run.device, num_workers)
    folder = claim_bench_folder(config, family)
    try:
        # Of two --bench-dir the last counts.
        start_workers(["bench", family, *flags, "--bench-dir", str(folder)], num_workers)
    except WorkerError as failure:
        # The worker has said already what the user can mend, and that it was interrupted needs no saying.
        if failure.exit_code not in (2, 130):
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
