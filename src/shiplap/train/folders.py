"""The folders that a run writes to: their names, and whether it may."""

from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

from shiplap.checkpoint import check_can_write
from shiplap.config import TrainConfig, TransformerConfig, UserError
from shiplap.families.config_json import to_huggingface


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


def step_folder(save: str, step: int) -> Path:
    """The folder of the model after so many steps."""
    return Path(save) / f"step-{step}"


def adapters_folder(path: str, config: TrainConfig, step: int) -> Path:
    """The folder of the adapters after so many steps: `path` itself after the last, one beside it before."""
    return Path(path) if step == config.optimizer.num_iteration else Path(f"{path}-step-{step}")


def is_save_due(config: TrainConfig, step: int) -> bool:
    """Whether something is saved after so many steps, if anything is saved at all."""
    interval, is_last = config.run.save_interval, step == config.optimizer.num_iteration
    return is_last or (interval > 0 and step % interval == 0)


def _folders(config: TrainConfig) -> Iterator[tuple[str, Path]]:
    """Every folder that the run will make, with the flag that asks for it."""
    for step in range(1, config.optimizer.num_iteration + 1):
        if not is_save_due(config, step):
            continue
        if config.run.save is not None:
            yield f"--save {config.run.save}", step_folder(config.run.save, step)
        if config.lora.lora_save_path is not None:
            path = config.lora.lora_save_path
            yield f"--lora-save-path {path}", adapters_folder(path, config, step)


def check_save_folders(config: TrainConfig, *, family: str, model: TransformerConfig) -> None:
    """Find out whether the run will be able to save what it makes, before it begins. Writes nothing.

    Raises:
        UserError: safetensors is not installed, something is there already, or the model has no counterpart in
            `transformers`.
    """
    save = config.run.save
    if save is not None:
        to_huggingface(family, model, dtype="float32")
        if Path(save).exists() and not Path(save).is_dir():
            raise UserError(f"--save {save} is not a folder. Name one, or a new one.")
    for flag, folder in _folders(config):
        check_can_write(flag)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"{flag}: {folder.name} is there already, and this run would save its own. Nothing is written over: "
                "name another folder."
            )


def claim_save_folders(config: TrainConfig) -> None:
    """Make the folders that hold what is saved, if there are none, and find out whether they can be written to.

    Raises:
        UserError: one cannot.
    """
    for flag, folder in dict(_folders(config)).items():
        probe = folder.parent / ".writable"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"{flag}: cannot write there: {error.strerror} ({error.filename}).") from None
