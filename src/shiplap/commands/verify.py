"""`shiplap verify`."""

from collections.abc import Sequence

from shiplap.commands.options import parse_config
from shiplap.commands.run_on_ranks import UNREAD, run_on_ranks
from shiplap.tools.verify.options import VerifyConfig
from shiplap.tools.verify.run import verify
from shiplap.tools.verify.table import check_writable

_DESCRIPTION = (
    "Check the parallel layers on this machine's devices, or under torchrun on all machines of the job: output and "
    "every gradient against the unsharded layer in float64, for every overlap method, and which results are the same "
    "to the bit. Ends with exit code 0, or 1 if something is wrong."
)
_EXIT_CODES = {"passed": 0, "failed": 1, "unread": UNREAD}


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code: 1 if a layer is wrong.

    Raises:
        UserError: a user error.
    """
    config = parse_config(VerifyConfig, arguments, prog="shiplap verify", description=_DESCRIPTION)
    return run_on_ranks(
        ["verify", *arguments],
        num_workers=config.check.tensor_parallel_size,
        device=config.check.device,
        here=lambda: _EXIT_CODES[verify(config)],
        check=lambda: check_writable(config.check.json_file),
        verdicts=(_EXIT_CODES["failed"],),
    )
