"""All ranks agree before they go on: on what was asked for, and on whether anything is wrong.

A rank that finds a mistake alone would stop while the others wait for it. Here every rank says what it found, and
all of them stop together, with one message that names the ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from shiplap.config.option import UserError


class AgreedError(UserError):
    """A mistake that every rank knows of, so that one of them can report it for all."""


def gather_texts(text: str) -> list[str]:
    """What every rank says, in rank order; on every rank. These objects come from our own ranks, over our own group."""
    if not dist.is_initialized():
        return [text]
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    return [answer or "" for answer in said]


@contextmanager
def fail_together() -> Iterator[None]:
    """Run a check that may raise `UserError` on some ranks; afterwards all ranks raise, or none.

    Raises:
        AgreedError: on every rank, if any rank raised a `UserError`; says which ranks found what.
    """
    found = ""
    try:
        yield
    except UserError as error:
        found = str(error)
    answers = gather_texts(found)
    if not any(answers):
        return
    if len(set(answers)) == 1:
        raise AgreedError(answers[0])
    reports = [f"{_ranks(answers, message)}: {message}" for message in dict.fromkeys(answers) if message]
    raise AgreedError("\n".join(reports))


def check_same_everywhere(settings: Mapping[str, object]) -> None:
    """Make sure that all ranks were started with the same settings.

    Raises:
        AgreedError: on every rank, naming the first setting that differs, its values, and who has which.
    """
    with fail_together():
        for name, value in settings.items():
            values = gather_texts(repr(value))
            if len(set(values)) > 1:
                differing = "; ".join(f"{_ranks(values, v)}: {v}" for v in dict.fromkeys(values))
                raise UserError(f"All ranks must be started alike, but they differ in {name}: {differing}.")


def _ranks(answers: list[str], answer: str) -> str:
    """`rank 3` or `ranks 0, 2`: who gave this answer."""
    ranks = [str(rank) for rank, given in enumerate(answers) if given == answer]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
