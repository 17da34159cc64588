"""What every group of options uses: fields with help text and flag, the exception for user errors, the cache folder."""

import dataclasses
import os
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Input that the user can mend: a flag, a file, a machine that lacks something.

    The message names the flag or the file and both numbers. The command line prints it without a traceback and
    exits with code 2; library callers catch it as a `ValueError`.
    """


def option(default: Any, help_text: str, *, flag: str | None = None) -> Any:
    """A dataclass field with the text that `--help` shows for it.

    Args:
        default: the value when nothing is said.
        help_text: one or two sentences; names the unit where there is one.
        flag: the flag's name without `--`, where it is not the field's name.
    """
    metadata = {"help": help_text} if flag is None else {"help": help_text, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(config: Any) -> dict[str, object]:
    """Everything that was asked for, by flag.

    Args:
        config: a dataclass whose fields are dataclasses, each a group of options.
    """
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    return {flag_of(field): getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def check_at_least(config: Any, minimum: float, *names: str) -> None:
    """Refuse options below `minimum`, by the name of their flag.

    Raises:
        UserError: naming the flag and both numbers.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value is not None and not value >= minimum:
            raise UserError(f"{flag_of(field)} must be at least {minimum}, got {value}.")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag of a field as the user types it, such as `--tensor-parallel`."""
    return "--" + str(field.metadata.get("flag", field.name)).replace("_", "-")


def cache_folder() -> Path:
    """`shiplap` in `$XDG_CACHE_HOME`, or else in `~/.cache`. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shiplap"
