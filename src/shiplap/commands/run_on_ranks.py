"""Runs a verb on its ranks: in this process, or in local workers that this process starts."""

import sys
from collections.abc import Callable, Collection, Sequence

from shiplap.commands.options import report
from shiplap.dist.agreement import AgreedError
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers

UNREAD = 141
"""Exit code if nobody reads the output any more, as after SIGPIPE in a shell."""
_NEEDS_NO_REPORT = (2, 130, UNREAD)
"""Exit codes of a worker: it has reported a user error, was interrupted, or nobody would read the report."""


def run_on_ranks(
    command: Sequence[str],
    *,
    num_workers: int,
    device: str,
    here: Callable[[], int | None],
    check: Callable[[], object],
    claim: Callable[[], Sequence[str]] = tuple,
    verdicts: Collection[int] = (),
) -> int:
    """Run a verb; returns the exit code.

    Under a launcher this process is one of the ranks. Without one, a single rank runs in this process too, and more
    run in workers that are started here with the same command.

    Args:
        command: the verb and its arguments.
        num_workers: the number of ranks to run without a launcher.
        device: `cpu` or `cuda`.
        here: the work of one rank; returns its exit code, None for 0.
        check: called before workers are started: checks all that needs no workers, so that the user reads of a mistake
            once and at once.
        claim: called after that: makes what the workers share, and returns the flags that name it, which take the
            place of the same flags in `command`.
        verdicts: exit codes of the verb's own that need no report, unless a worker raised an exception.

    Raises:
        UserError: a mistake that was found before the ranks met.
    """
    if under_torchrun() or num_workers == 1:
        with joined_world(device):
            try:
                return here() or 0
            except AgreedError as error:
                # All ranks know of it and all are still here: rank 0 must report it before any of them leaves.
                report(error)
                return 2
    check()
    check_devices(device, num_workers)
    try:
        # Of two same flags the last counts.
        start_workers([*command, *claim()], num_workers)
    except WorkerError as failure:
        is_verdict = failure.exit_code in verdicts and not failure.has_raised
        if failure.exit_code not in _NEEDS_NO_REPORT and not is_verdict:
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
