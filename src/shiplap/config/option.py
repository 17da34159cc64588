"""How a configuration field carries its help text and its flag: in the field's own metadata."""

import dataclasses
from typing import Any


def option(default: Any, help_text: str, *, flag: str | None = None) -> Any:
    """A dataclass field with the text that `--help` shows for it.

    Args:
        default: the value when nothing is said.
        help_text: one or two sentences; names the unit where there is one.
        flag: the flag's name without `--`, where it is not the field's name.
    """
    metadata = {"help": help_text} if flag is None else {"help": help_text, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag of a field as the user types it, such as `--tensor-parallel`."""
    return "--" + str(field.metadata.get("flag", field.name)).replace("_", "-")
