"""How a mistake that the user can mend is shown."""

import os
import sys

from shiplap.config import UserError
from shiplap.dist.agreement import AgreedError


def report(error: UserError) -> None:
    """Say what is wrong: once for all ranks where they all know of it, else with the rank that found it."""
    rank = os.environ.get("RANK")
    if rank is None:
        print(f"shiplap: error: {error}", file=sys.stderr)
    elif not isinstance(error, AgreedError):
        print(f"shiplap: error: rank {rank}: {error}", file=sys.stderr)
    elif rank == "0":
        print(f"shiplap: error: {error}", file=sys.stderr, flush=True)
