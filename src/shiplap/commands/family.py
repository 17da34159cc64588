"""Verbs whose first argument is a family of models, such as `shiplap train gpt2`."""

from collections.abc import Sequence

from shiplap.commands.suggest import did_you_mean
from shiplap.config import UserError
from shiplap.config.presets import PRESETS


def split_family(verb: str, description: str, arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """The family and the flags after it; None after showing the help, if it is asked for instead.

    Args:
        verb: such as `train`.
        description: what it does, for the help.
        arguments: those after the verb.

    Raises:
        UserError: there is no family, or one that does not exist.
    """
    first = next(iter(PRESETS))
    if not arguments:
        raise UserError(f"{verb} needs the name of a model: {', '.join(PRESETS)}. For example: shiplap {verb} {first}")
    family, *flags = arguments
    if family in ("-h", "--help"):
        print(f"usage: shiplap {verb} {'|'.join(PRESETS)} [OPTIONS]\n\n{description}")
        print(f"`shiplap {verb} {first} --help` lists the options.")
        return None
    if family not in PRESETS:
        raise UserError(f"{verb}: there is no model {family}{did_you_mean(family, PRESETS)}")
    return family, flags
