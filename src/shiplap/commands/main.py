"""The command line: `shiplap VERB`. Each verb is imported only when used."""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import shiplap
from shiplap.commands.options import did_you_mean, report
from shiplap.commands.run_on_ranks import UNREAD
from shiplap.config import UserError

_VERBS = {
    "train": "Train a model: shiplap train gpt2 --help",
    "generate": "Write text with a model: shiplap generate DIR --prompt TEXT",
    "convert": "Write a model as a Hugging Face directory: shiplap convert SOURCE DESTINATION",
    "verify": "Check that the layers are right on this machine: shiplap verify --tensor-parallel 2",
    "explain": "Show what overlaps in training and, where nothing does, why: shiplap explain gpt2 --help",
    "tune": "Measure which overlap is the fastest on these ranks: shiplap tune gpt2 --help",
    "bench": "Measure what overlap gains on these ranks: shiplap bench gpt2 --help",
    "trace": "Record some training steps: what ran when, and what waited: shiplap trace gpt2 --help",
}
"""The verbs and their help. Each is the module of its name in this package, with a function `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after `shiplap`; by default those of this process.

    Returns:
        The exit code: 2 for a user error, 130 after Ctrl-C, 141 if nobody reads the output.
    """
    try:
        return _exit_code(sys.argv[1:] if argv is None else argv)
    finally:
        # A traceback's cycles may hold the last reference to a process group. Gloo's threads end with it; one that is
        # still alive when the interpreter ends can abort it.
        gc.collect()


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        with _progress_of_long_work():
            exit_code = _run(arguments)
    except UserError as error:
        report(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        exit_code = UNREAD
    if exit_code == UNREAD:
        # Nobody reads our output any more, as in `shiplap train gpt2 --help | head`. What is still buffered must go
        # nowhere, or the interpreter complains about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    verb, *others = arguments
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb == "--version":
        print(f"shiplap {shiplap.__version__}")
        return 0
    if verb not in _VERBS:
        raise UserError(f"there is no `shiplap {verb}`{did_you_mean(verb, _VERBS)}")
    return int(importlib.import_module(f"shiplap.commands.{verb}").run(others))


def _usage() -> str:
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, text in _VERBS.items())
    return f"usage: shiplap VERB ...\n\n{shiplap.__doc__}\n\n{verbs}\n\n  --version  Show the version."


@contextmanager
def _progress_of_long_work() -> Iterator[None]:
    """Show what shiplap logs, such as the progress of tokenizing a corpus; on one rank only."""
    logger = logging.getLogger("shiplap")
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
