"""`shiplap generate DIR`."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from shiplap.commands.options import parse_config
from shiplap.commands.run_on_ranks import UNREAD, run_on_ranks
from shiplap.config import UserError
from shiplap.dist.agreement import fail_together
from shiplap.dist.environment import under_torchrun
from shiplap.generation.options import GenerateConfig
from shiplap.generation.source import open_source, read_prompt
from shiplap.generation.write import write

_DESCRIPTION = (
    "Write text with a model from a Hugging Face directory DIR, or from the newest checkpoint in the folder DIR that "
    "`shiplap train --save` wrote."
)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    asks_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    if not asks_for_help and (not arguments or arguments[0].startswith("-")):
        raise UserError("generate needs a model's folder first. For example: shiplap generate DIR --prompt 'Once upon'")
    flags = arguments if asks_for_help else arguments[1:]
    config = parse_config(GenerateConfig, flags, prog="shiplap generate DIR", description=_DESCRIPTION)
    directory = arguments[0]
    prompt = cache(partial(read_prompt, config.text))  # the standard input can be read once only
    with ExitStack() as stack:
        return run_on_ranks(
            ["generate", *arguments],
            num_workers=config.machine.tensor_parallel_size,
            device=config.machine.device,
            here=lambda: _write_here(directory, config),
            check=lambda: open_source(directory, config, prompt()),
            claim=lambda: _prompt_for_workers(config, prompt(), stack),
        )


def _write_here(directory: str, config: GenerateConfig) -> int:
    with fail_together():
        if under_torchrun() and config.text.prompt_file == "-":
            raise UserError("--prompt-file -: a launcher's ranks share no standard input; name a file instead.")
        prompt = read_prompt(config.text)
    return 0 if write(directory, config, prompt) else UNREAD


def _prompt_for_workers(config: GenerateConfig, prompt: str, stack: ExitStack) -> list[str]:
    if config.text.prompt_file != "-":
        return []
    # Workers cannot read this process's standard input. They read this file, which lives as long as they do.
    file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shiplap-"))) / "prompt.txt"
    file.write_bytes(prompt.encode())
    return ["--prompt-file", str(file)]
