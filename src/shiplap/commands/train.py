"""`shiplap train FAMILY`: start local workers, or be one."""

import sys
from collections.abc import Sequence

from shiplap.commands.errors import report
from shiplap.commands.family import split_family
from shiplap.commands.options import parse_config
from shiplap.config import TrainConfig
from shiplap.dist import layout_for
from shiplap.dist.agreement import AgreedError
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.train.run_folder import claim_run_folder
from shiplap.train.save_folders import claim_save_folders
from shiplap.train.setup import set_up
from shiplap.train.trainer import train

_DESCRIPTION = "Train a model."


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    split = split_family("train", _DESCRIPTION, arguments)
    if split is None:
        return 0
    family, flags = split
    config = parse_config(TrainConfig, flags, prog=f"shiplap train {family}", description=_DESCRIPTION)
    num_workers = config.run.nproc or config.parallel.model_parallel_size
    if under_torchrun() or num_workers == 1:
        return _train_here(family, config)
    return _train_in_workers(family, config, flags, num_workers=num_workers)


def _train_here(family: str, config: TrainConfig) -> int:
    with joined_world(config.run.device):
        try:
            train(family, config)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    return 0


def _train_in_workers(family: str, config: TrainConfig, flags: Sequence[str], *, num_workers: int) -> int:
    """Check here everything that can be checked, so that the user hears of it once and at once; then start workers."""
    set_up(family, config, layout=layout_for(config.parallel, num_workers), data_parallel_rank=0)
    check_devices(config.run.device, num_workers)
    claim_save_folders(config)
    folder = claim_run_folder(config.run.run_dir, family)
    try:
        # Of two --run-dir the last counts.
        start_workers(["train", family, *flags, "--run-dir", str(folder)], num_workers)
    except WorkerError as failure:
        # The worker has said already what the user can mend, and that it was interrupted needs no saying.
        if failure.exit_code not in (2, 130):
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
