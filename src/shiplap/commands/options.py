"""What the verbs share on the command line: flags from dataclasses, the family before them, and reports of mistakes.

`shiplap.config` knows nothing of tyro, which parses the flags. So each dataclass is mirrored by one that has the same
fields with tyro's annotations, made from the metadata that `shiplap.config.option` keeps: flag and help text.
"""

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, get_args

from shiplap.config import UserError
from shiplap.dist.agreement import AgreedError
from shiplap.families import FAMILIES

Config = TypeVar("Config")


def parse_run(
    config: type[Config], arguments: Sequence[str], *, verb: str, description: str
) -> tuple[str, Config] | None:
    """The family and the options of a verb such as `shiplap train gpt2`; None after `--help` in place of a family.

    Args:
        config: as in `parse_config`.
        arguments: those after the verb.
        verb: such as `train`.
        description: what it does, for the help.

    Raises:
        UserError: there is no family, or one that does not exist; or as in `parse_config`.
    """
    first = next(iter(FAMILIES))
    if not arguments:
        raise UserError(f"{verb} needs the name of a model: {', '.join(FAMILIES)}. For example: shiplap {verb} {first}")
    family, *flags = arguments
    if family in ("-h", "--help"):
        print(f"usage: shiplap {verb} {'|'.join(FAMILIES)} [OPTIONS]\n\n{description}")
        print(f"`shiplap {verb} {first} --help` lists the options.")
        return None
    if family not in FAMILIES:
        raise UserError(f"{verb}: there is no model {family}{did_you_mean(family, FAMILIES)}")
    return family, parse_config(config, flags, prog=f"shiplap {verb} {family}", description=description)


def parse_config(config: type[Config], arguments: Sequence[str], *, prog: str, description: str) -> Config:
    """What the flags ask for. Shows help, or what is wrong with the flags, on one rank only.

    Args:
        config: a dataclass whose fields are dataclasses, each a group of flags made by `shiplap.config.option`.
        arguments: the flags.
        prog: the command, for the help.
        description: what the command does, for the help.

    Raises:
        UserError: values that do not fit together, or tyro is not installed.
        SystemExit: with 0 after `--help`, with 2 for flags that do not exist or have no such value.
    """
    try:
        import tyro
    except ImportError:
        raise UserError("the command line needs tyro: pip install 'shiplap[train]'.") from None
    groups: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    mirrors = [
        (name, mirror, dataclasses.field(default_factory=mirror))
        for name, mirror in ((name, _mirror(group)) for name, group in groups.items())
    ]
    parsed: Any = tyro.cli(
        dataclasses.make_dataclass("Options", mirrors),
        config=(tyro.conf.OmitArgPrefixes,),
        prog=prog,
        description=f"{description} Flags may be written with - or with _.",
        args=list(arguments),
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return config(**{name: _original(group, getattr(parsed, name)) for name, group in groups.items()})


def _mirror(original: Any) -> Any:
    """A dataclass like `original`, annotated for tyro, that checks nothing."""
    import tyro

    fields = []
    for field in dataclasses.fields(original):
        optional = type(None) in get_args(field.type)
        annotation = tyro.conf.arg(
            name=field.metadata.get("flag", field.name),
            help=field.metadata["help"],
            # tyro would write {None}|INT, and the default None, where the help text tells what happens without it.
            metavar=get_args(field.type)[0].__name__.upper() if optional else None,
            help_behavior_hint="" if optional else None,
        )
        fields.append((field.name, Annotated[field.type, annotation], dataclasses.field(default=field.default)))
    return dataclasses.make_dataclass(original.__name__, fields, namespace={"__doc__": original.__doc__})


def _original(original: Any, mirror: Any) -> Any:
    """The real dataclass with the mirror's values; it checks itself."""
    return original(**{field.name: getattr(mirror, field.name) for field in dataclasses.fields(original)})


def require_matplotlib(verb: str) -> None:
    """Raise before anything runs, rather than after it, if the figure could not be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"{verb} draws with matplotlib: pip install 'shiplap[train]'.") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the closest known one, or all of them."""
    names = list(known)
    close = get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there is {', '.join(names)}."


def report(error: UserError) -> None:
    """Print a user error: once if all ranks know of it, else with the rank that found it."""
    rank = os.environ.get("RANK")
    if rank is None:
        print(f"shiplap: error: {error}", file=sys.stderr)
    elif not isinstance(error, AgreedError):
        print(f"shiplap: error: rank {rank}: {error}", file=sys.stderr)
    elif rank == "0":
        print(f"shiplap: error: {error}", file=sys.stderr, flush=True)
