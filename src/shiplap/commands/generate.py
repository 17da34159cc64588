"""`shiplap generate DIR`: start local workers, or be one."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shiplap.commands.errors import report
from shiplap.commands.options import parse_config
from shiplap.config import UserError
from shiplap.config.generate import GenerateConfig
from shiplap.dist.agreement import AgreedError, fail_together
from shiplap.dist.environment import under_torchrun
from shiplap.dist.launch import WorkerError, check_devices, joined_world, start_workers
from shiplap.generation.source import open_source, read_prompt
from shiplap.generation.write import write

_DESCRIPTION = (
    "Write text with a model from a Hugging Face directory DIR, or from the newest checkpoint in the folder DIR that "
    "`shiplap train --save` wrote."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: something that the user can mend.
    """
    asks_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    if not asks_for_help and (not arguments or arguments[0].startswith("-")):
        raise UserError("generate needs a model's folder first. For example: shiplap generate DIR --prompt 'Once upon'")
    flags = arguments if asks_for_help else arguments[1:]
    config = parse_config(GenerateConfig, flags, prog="shiplap generate DIR", description=_DESCRIPTION)
    if under_torchrun() or config.machine.tensor_parallel_size == 1:
        return _write_here(arguments[0], config)
    return _write_in_workers(arguments[0], config, flags)


def _write_here(directory: str, config: GenerateConfig) -> int:
    with joined_world(config.machine.device):
        try:
            with fail_together():
                if under_torchrun() and config.text.prompt_file == "-":
                    raise UserError("--prompt-file -: a launcher's ranks share no standard input; name a file instead.")
                prompt = read_prompt(config.text)
            is_read = write(directory, config, prompt)
        except AgreedError as error:
            # All ranks know of it and all are still here: rank 0 must have said it before any of them leaves.
            report(error)
            return 2
    if not is_read:
        raise BrokenPipeError
    return 0


def _write_in_workers(directory: str, config: GenerateConfig, flags: Sequence[str]) -> int:
    """Check here what can be checked without the weights, so that the user hears of it at once; then start workers."""
    prompt = read_prompt(config.text)
    open_source(directory, config, prompt)
    num_workers = config.machine.tensor_parallel_size
    check_devices(config.machine.device, num_workers)
    with tempfile.TemporaryDirectory(prefix="shiplap-") as folder:
        if config.text.prompt_file == "-":
            # Only this process can read it. Of two --prompt-file the last counts.
            file = Path(folder) / "prompt.txt"
            file.write_bytes(prompt.encode())
            flags = [*flags, "--prompt-file", str(file)]
        try:
            start_workers(["generate", directory, *flags], num_workers)
        except WorkerError as failure:
            # The worker has said already what the user can mend. That it was interrupted, or that nobody reads what it
            # writes, needs no saying.
            if failure.exit_code not in (2, 130, 141):
                print(f"shiplap: error: {failure}", file=sys.stderr)
            return failure.exit_code
    return 0
