"""`shiplap train FAMILY`."""

from collections.abc import Sequence
from functools import partial

from shiplap.commands.options import parse_run
from shiplap.commands.run_on_ranks import run_on_ranks
from shiplap.config import TrainConfig
from shiplap.dist import layout_for
from shiplap.train.folders import claim_run_folder, claim_save_folders
from shiplap.train.setup import set_up
from shiplap.train.trainer import train

_DESCRIPTION = "Train a model."


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    parsed = parse_run(TrainConfig, arguments, verb="train", description=_DESCRIPTION)
    if parsed is None:
        return 0
    family, config = parsed
    return run_on_ranks(
        ["train", *arguments],
        num_workers=config.num_workers,
        device=config.run.device,
        here=partial(train, family, config),
        check=partial(_check, family, config),
        claim=partial(_claim, family, config),
    )


def _check(family: str, config: TrainConfig) -> None:
    set_up(family, config, layout=layout_for(config.parallel, config.num_workers), data_parallel_rank=0)


def _claim(family: str, config: TrainConfig) -> list[str]:
    claim_save_folders(config)
    return ["--run-dir", str(claim_run_folder(config.run.run_dir, family))]
