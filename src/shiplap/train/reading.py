"""Reading data on every rank, when one rank alone may find that it is bad."""

from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.config import UserError
from shiplap.dist.agreement import fail_together
from shiplap.dist.collectives import Group, all_reduce

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each int64 `[B, S]`."""


def read_together(read: Callable[[], list[Batch]], data_parallel_group: Group) -> list[Batch]:
    """What `read` gives, if all ranks can read theirs.

    TP ranks of a replica read the same, so they fail alike. Replicas read different parts of the data, so they ask
    each other, with one number a call: this runs in every step, and `fail_together` takes five times as long.

    Raises:
        AgreedError: on every rank, if `read` raised a `UserError` on any.
    """
    batches: list[Batch] = []
    found: UserError | None = None
    try:
        batches = read()
    except UserError as error:
        found = error
    failures = all_reduce(torch.tensor(float(found is not None)), data_parallel_group).wait()
    if failures > 0:
        with fail_together():
            if found is not None:
                raise found
    return batches
