"""Measured plans as JSON files: written whole or not at all, read with every field checked."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from shiplap.config import UserError
from shiplap.config.json_fields import JsonFields, read_json_object
from shiplap.overlap import registry
from shiplap.overlap.plan import ColumnPlan, Keeps, Parts, RowPlan
from shiplap.tuning.measured import Conditions, Kept, MeasuredPass, MeasuredPlan, Timing

_FORMAT = "shiplap measured plan 1"
_FIELDS = {
    ("column", "forward"): ("forward",),
    ("column", "backward"): ("dgrad", "wgrad", "keeps"),
    ("row", "forward"): ("forward",),
    ("row", "backward"): ("dgrad", "wgrad"),
}
"""What a pass may say of a layer's plan. Whether the run allows such methods, `MeasuredPlan.check` says."""
_SITES = ("forward", "dgrad", "wgrad")
_NO_METHODS = (*get_args(Keeps), *get_args(Parts))


def write_plan(plan: MeasuredPlan, path: Path) -> None:
    """Write a plan, replacing what is there.

    Raises:
        UserError: the file cannot be written.
    """
    content = {
        "format": _FORMAT,
        "made": plan.made,
        "conditions": dataclasses.asdict(plan.conditions),
        "passes": [dataclasses.asdict(measured) for measured in plan.passes],
    }
    text = json.dumps(content, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read or write it at this moment: a rename is seen whole or not at all.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}-") as folder:
            whole = Path(folder) / path.name
            whole.write_text(text)
            os.replace(whole, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the plan: {error.strerror}.") from None


def check_writable(path: Path) -> None:
    """Refuse a place where a plan could not be written, before it is measured. Makes the folder.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            is_folder = path.is_dir()
    except OSError as error:
        raise UserError(f"{path}: cannot write the plan: {error.strerror}.") from None
    if is_folder:
        raise UserError(f"{path} is a folder; name a file in it.")


def read_plan(path: Path) -> MeasuredPlan:
    """A plan from a file.

    Raises:
        UserError: the file cannot be read, or is no plan; names the field.
    """
    return plan_from(read_json_object(path), source=str(path))


def plan_from(content: Mapping[str, Any], *, source: str) -> MeasuredPlan:
    """A plan from what its file holds.

    Raises:
        UserError: it is no plan; names the source and the field.
    """
    fields = JsonFields(source, content)
    if fields.text("format", "") != _FORMAT:
        raise UserError(f"{source} is no measured plan of this version of shiplap. Make one with `shiplap tune`.")
    passes: list[MeasuredPass] = []
    for number, entry in enumerate(fields.list("passes")):
        if not isinstance(entry, dict):
            raise UserError(f"{source}: passes {number} is not an object.")
        measured = _pass(JsonFields(f"{source}: passes {number}", entry))
        # Which of the two would count?
        if any(one.layer == measured.layer and one.direction == measured.direction for one in passes):
            raise UserError(f"{source}: passes {number} is of the same layer and direction as another one; remove one.")
        passes.append(measured)
    return MeasuredPlan(
        source=source, made=fields.text("made"), conditions=_conditions(fields.inner("conditions")), passes=passes
    )


def _conditions(fields: JsonFields) -> Conditions:
    values = {
        field.name: fields.integer(field.name) if field.type is int else fields.text(field.name)
        for field in dataclasses.fields(Conditions)
    }
    return Conditions(**values)  # type: ignore[arg-type] # each by its own field's type


def _pass(fields: JsonFields) -> MeasuredPass:
    layer, direction = fields.inner("layer"), fields.text("direction")
    kind = layer.text("kind")
    if (kind, direction) not in _FIELDS:
        raise UserError(
            f"{fields.path}: it must be the forward or backward direction of a layer of kind column or row, got "
            f"direction {direction}, kind {kind}."
        )
    plan_fields, timings = fields.inner("fields"), fields.inner("timings")
    for name in fields.mapping("fields"):
        if name not in _FIELDS[kind, direction]:
            raise UserError(f"{plan_fields.path} has {name}, which no {direction} pass of a {kind} layer has.")
    if plan_fields.has("keeps") and plan_fields.text("keeps") not in get_args(Keeps):
        raise UserError(f"{plan_fields.path}: keeps must be {' or '.join(get_args(Keeps))}.")
    if kind == "row" and plan_fields.has("wgrad") and plan_fields.text("wgrad") not in get_args(Parts):
        raise UserError(f"{plan_fields.path}: wgrad must be {' or '.join(get_args(Parts))}.")
    methods = {name: _todays(plan_fields.text(name), plan_fields) for name in fields.mapping("fields")}
    try:
        _ = ColumnPlan(**methods) if kind == "column" else RowPlan(**methods)  # type: ignore[arg-type] # checked above
    except ValueError as error:
        raise UserError(f"{plan_fields.path}: {error} Measure again, or mend the file.") from None
    return MeasuredPass(
        layers=[str(path) for path in fields.list("layers")],
        layer=fields.mapping("layer"),
        direction="forward" if direction == "forward" else "backward",
        method=_todays(fields.text("method"), fields),
        fields=methods,
        is_clear=fields.flag("is_clear", False),
        speedup=fields.number("speedup"),
        timings={_todays(name, timings): _timing(timings.inner(name)) for name in fields.mapping("timings")},
        kept=_kept(fields.inner("kept")) if fields.has("kept") else None,
    )


def _todays(name: str, fields: JsonFields) -> str:
    """A method's name, or that of a candidate such as `dgrad direct, wgrad ring`, in today's words.

    Raises:
        UserError: there is no such method.
    """
    words = []
    for part in name.split(", "):
        site, space, text = part.partition(" ")
        if site not in _SITES or not space:
            site, text = "", part
        try:
            method = text if text in _NO_METHODS else str(registry.method(text))
        except ValueError as error:
            raise UserError(f"{fields.path}: {error} Measure again, or mend the file.") from None
        words.append(f"{site} {method}".lstrip())
    return ", ".join(words)


def _timing(fields: JsonFields) -> Timing:
    return Timing(
        median_ms=fields.number("median_ms"), rounds=fields.integer("rounds"), speedup=fields.number("speedup")
    )


def _kept(fields: JsonFields) -> Kept:
    return Kept(
        method=_todays(fields.text("method"), fields),
        speedup=fields.number("speedup"),
        is_clear=fields.flag("is_clear", False),
        memory_bytes=fields.integer("memory_bytes"),
    )
