"""`shiplap convert SOURCE DESTINATION`: a model on disk becomes a Hugging Face directory."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shiplap.checkpoint import MergedAdapters, newest_checkpoint, open_stored_model, write_huggingface
from shiplap.commands.options import parse_config
from shiplap.config import UserError
from shiplap.config.option import option

_DESCRIPTION = (
    "Write the model in SOURCE as a Hugging Face directory DESTINATION, which must be new. SOURCE is a Hugging Face "
    "directory, a folder of checkpoints that `shiplap train --save` wrote, of which the newest is taken, or an llm.c "
    "model file. The model is never in memory as a whole, only one parameter and one new file."
)
Parameters = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """How the weights are written."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = option(
        "keep", "Type of the weights in the new files; keep: each as it is."
    )
    lora: str | None = option(None, "Folder with adapters in PEFT's format, which are merged into the weights.")
    max_file_gb: float = option(
        5.0, "Largest size of one file of weights, in GB (1e9 bytes); so much is also held in memory."
    )

    def __post_init__(self) -> None:
        """Refuse a size that holds nothing."""
        if not self.max_file_gb > 0:
            raise UserError(f"--max-file-gb must be above 0, got {self.max_file_gb}.")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """One call of `shiplap convert`, but for where from and where to."""

    weights: WeightOptions = dataclasses.field(default_factory=WeightOptions)


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: a user error.
    """
    asks_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    if not asks_for_help and (len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2])):
        raise UserError(
            "convert needs the model and a new folder first. For example: shiplap convert checkpoints model --dtype "
            "bfloat16"
        )
    flags = arguments if asks_for_help else arguments[2:]
    config = parse_config(ConvertConfig, flags, prog="shiplap convert SOURCE DESTINATION", description=_DESCRIPTION)
    _convert(newest_checkpoint(arguments[0]), arguments[1], config)
    return 0


def _convert(source: str, destination: str, config: ConvertConfig) -> None:
    model = open_stored_model(source)
    print(f"{source}: {model.family}, {model.num_elements:,} parameters", flush=True)
    parameters = model.parameters()
    if config.weights.lora is not None:
        merge = MergedAdapters(config.weights.lora, family=model.family, config=model.config)
        parameters = ((name, merge(name, whole)) for name, whole in parameters)
        print(f"{config.weights.lora}: {merge.num_layers} layers are adapted", flush=True)
    dtype, has_tokenizer = config.weights.dtype, Path(source).is_dir()
    with _progress(model.num_elements) as shown:
        write_huggingface(
            destination,
            family=model.family,
            config=model.config,
            dtype=None if dtype == "keep" else getattr(torch, dtype),
            tensors=shown(parameters),
            tokenizer_from=source if has_tokenizer else None,
            max_file_bytes=int(config.weights.max_file_gb * 1e9),
        )
    if not has_tokenizer:
        print(f"{source} has no tokenizer beside it: put tokenizer.json and tokenizer_config.json into {destination}.")
    print(f"written: {destination}")


@contextmanager
def _progress(num_elements: int) -> Iterator[Callable[[Parameters], Parameters]]:
    """Something that shows, on a terminal, how many parameters have gone through it."""
    if not sys.stderr.isatty():
        yield lambda parameters: parameters
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError as error:
        print(f"There is no progress bar ({error}): pip install 'shiplap[train]' brings it.", file=sys.stderr)
        yield lambda parameters: parameters
        return
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_elements)

        def shown(parameters: Parameters) -> Parameters:
            for name, whole in parameters:
                progress.update(task, description=name)
                yield name, whole
                progress.update(task, advance=whole.numel())
                del whole  # before the next one is there

        yield shown
