"""`shiplap verify`: start local workers, or be one."""

import sys
from collections.abc import Sequence

from shiplap.commands.errors import report
from shiplap.commands.options import parse_config
from shiplap.config.verify import VerifyConfig
from shiplap.dist.agreement import AgreedError
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.tools.verify import check_writable, verify

_DESCRIPTION = (
    "Check the parallel layers on this machine's devices, or under torchrun on all machines of the job: output and "
    "every gradient against the unsharded layer in float64, for every way to overlap, and which results are the same "
    "to the bit. Ends with exit code 0, or 1 if something is wrong."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code: 1 if a layer is wrong.

    Raises:
        UserError: something that the user can mend.
    """
    config = parse_config(VerifyConfig, arguments, prog="shiplap verify", description=_DESCRIPTION)
    if under_torchrun() or config.check.tensor_parallel_size == 1:
        return _verify_here(config)
    return _verify_in_workers(config, arguments)


def _verify_here(config: VerifyConfig) -> int:
    with joined_world(config.check.device):
        try:
            outcome = verify(config)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    if outcome == "unread":
        raise BrokenPipeError
    return 0 if outcome == "passed" else 1


def _verify_in_workers(config: VerifyConfig, arguments: Sequence[str]) -> int:
    """Check here what can be checked without them, so that the user hears of it at once; then start workers."""
    num_workers = config.check.tensor_parallel_size
    check_writable(config.check.json_file)
    check_devices(config.check.device, num_workers)
    try:
        start_workers(["verify", *arguments], num_workers)
    except WorkerError as failure:
        # The workers have said already what is wrong with the layers or with what the user asked for. That they were
        # interrupted, or that nobody reads what they write, needs no saying.
        if failure.exit_code not in (1, 2, 130, 141) or (failure.exit_code == 1 and failure.has_raised):
            print(f"shiplap: error: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0
