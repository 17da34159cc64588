"""The folder that a run writes to: its name, and the resolved configuration in it."""

import dataclasses
import json
import platform
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

import torch

import shiplap
from shiplap.config import UserError
from shiplap.dist import RankLayout
from shiplap.train.setup import Setup


def claim_run_folder(asked: str | None, family: str, *, flag: str = "--run-dir") -> Path:
    """Make the folder of a run. One that holds files already is left alone: the name gets a number.

    Args:
        asked: what `--run-dir` says; without it the name is `runs/FAMILY-DATE-TIME`.
        family: the model, for the name.
        flag: that says it, where it is another one.

    Raises:
        UserError: the folder cannot be made, or not be written to.
    """
    try:
        for folder in _candidates(asked, family):
            if _claim(folder, may_exist=asked is not None):
                return folder
    except OSError as error:
        where = "." if asked is None else asked
        raise UserError(
            f"{flag} {where}: cannot write there: {error.strerror} ({error.filename}). Name a folder that can be "
            "written to."
        ) from None
    raise AssertionError("There is always another number.")


def _candidates(asked: str | None, family: str) -> Iterator[Path]:
    first = Path(asked or f"runs/{family}-{datetime.now():%Y%m%d-%H%M%S}")
    yield first
    for number in count(2):
        yield first.with_name(f"{first.name}-{number}")


def _claim(folder: Path, *, may_exist: bool) -> bool:
    """Make the folder, or take an empty one; False if it is somebody else's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        # The process that starts the workers makes the folder, and tells them to use it. `iterdir` fails on a file.
        if any(folder.iterdir()) or not may_exist:
            return False
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
    return True


def write_config(folder: Path, setup: Setup, layout: RankLayout) -> None:
    """Write `config.json`: every option with what its default came to, the model's sizes, and the versions."""
    config = setup.config
    resolved = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, total_batch_size=setup.tokens_per_step),
        run=dataclasses.replace(config.run, nproc=layout.world_size, run_dir=str(folder)),
    )
    content = {
        "family": setup.family,
        "transformer": dataclasses.asdict(setup.model),
        "options": dataclasses.asdict(resolved),
        "world_size": layout.world_size,
        "layout": layout.sizes,
        "versions": {
            "shiplap": shiplap.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
