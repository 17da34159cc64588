"""The fields of a JSON file that somebody else wrote: read by type, and none of them overlooked."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from shiplap.config.option import UserError


def read_json_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds, which must be an object.

    Raises:
        UserError: the file is missing, unreadable or something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__} instead of an object.")
    return content


class JsonFields:
    """The fields of one JSON object. Null is the same as absent, unless said otherwise.

    Every method raises `UserError`, which names the file and the field.
    """

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        """Nothing is read yet.

        Args:
            path: the file, and where in it the object stands, for messages.
            values: the object.
        """
        self.path = path
        self._values = values
        self._known: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there, and is null."""
        return name in self._values and self._values[name] is None

    def integer(self, name: str, default: int | None = None) -> int:
        """A count, at least 1; without a default the field must be there."""
        value = self._typed(name, default, "a whole number", lambda value: type(value) is int)
        if value < 1:
            raise UserError(f"{self.path}: {name} must be at least 1, got {value}.")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, at least 0; without a default the field must be there."""
        value = self._typed(name, default, "a number", lambda value: type(value) in (int, float) and isfinite(value))
        if value < 0:
            raise UserError(f"{self.path}: {name} must be at least 0, got {value}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self._typed(name, default, "true or false", lambda value: type(value) is bool))

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default the field must be there."""
        return str(self._typed(name, default, "a string", lambda value: isinstance(value, str)))

    def mapping(self, name: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """An object; without a default the field must be there."""
        value: Mapping[str, Any] = self._typed(name, default, "an object", lambda value: isinstance(value, dict))
        return value

    def list(self, name: str) -> Sequence[Any]:
        """A list; the field must be there."""
        value: Sequence[Any] = self._typed(name, None, "a list", lambda value: isinstance(value, list))
        return value

    def inner(self, name: str) -> "JsonFields":
        """The fields of an object; none where it is absent."""
        return JsonFields(f"{self.path}: {name}", self.mapping(name, {}))

    def must_be(self, name: str, *accepted: object) -> None:
        """Refuse every value but these, the first of which is what an absent field means."""
        self._known.add(name)
        value = self._values.get(name)
        # Python's True is 1, and its False 0.
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted
        ):
            allowed = " or ".join(json.dumps(a) for a in accepted)
            raise UserError(f"{self.path}: {name} {_shown(value)} is not supported; it must be {allowed}.")

    def every(self, name: str, *accepted: object) -> None:
        """Refuse a list that holds anything but these."""
        for value in self._typed(name, [], "a list", lambda value: isinstance(value, list)):
            if value not in accepted:
                allowed = " or ".join(json.dumps(a) for a in accepted)
                raise UserError(f"{self.path}: {name} with {_shown(value)} is not supported; each must be {allowed}.")

    def ignore(self, *names: str) -> None:
        """These may be anything."""
        self._known |= set(names)

    def refuse_others(self) -> None:
        """Refuse a field that nothing above has asked for, unless it is null, false or empty."""
        for name, value in self._values.items():
            if name not in self._known and value is not None and value is not False and value not in ({}, []):
                raise UserError(
                    f"{self.path}: {name} is not a field that shiplap knows; it is {_shown(value)}. If it does not "
                    "change the mathematics of the model, remove it from the file."
                )

    def _typed(self, name: str, default: Any, what: str, is_right: Callable[[Any], bool]) -> Any:
        self._known.add(name)
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise UserError(f"{self.path}: {name} is missing.")
            return default
        if not is_right(value):
            raise UserError(f"{self.path}: {name} must be {what}, got {_shown(value)}.")
        return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
