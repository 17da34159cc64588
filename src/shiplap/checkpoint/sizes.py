"""The sizes of the model that a run asks for: a preset's or a checkpoint's, with what was asked to be otherwise."""

import dataclasses

from shiplap.checkpoint.llmc_header import read_llmc_header
from shiplap.config import ModelOptions, TransformerConfig, UserError
from shiplap.families import FAMILIES, preset
from shiplap.families.config_json import read_config


def sizes_of_run(options: ModelOptions, family: str) -> TransformerConfig:
    """The preset's or the checkpoint's sizes, with the options' own in their place.

    Args:
        options: which model, and what to change about it.
        family: a key of `shiplap.families.FAMILIES`.

    Raises:
        UserError: unknown preset, a checkpoint that cannot be used, or sizes that do not fit together.
    """
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    asked = {name: value for name, value in vars(options).items() if name in names and value is not None}
    if options.hf_checkpoint is not None:
        _, model = read_config(options.hf_checkpoint, family)
    elif options.llmc_filepath is not None:
        model = read_llmc_header(options.llmc_filepath, family=family).config
    else:
        return dataclasses.replace(preset(family, options.preset or f"{family}-debug"), **asked)
    if options.max_sequence_length is not None:
        _check_length(options.max_sequence_length, model.max_sequence_length, family=family)
    return dataclasses.replace(model, **asked)


def _check_length(asked: int, longest: int, *, family: str) -> None:
    """Refuse a length that a checkpoint does not have."""
    if FAMILIES[family].architecture.positions == "learned" and asked != longest:
        raise UserError(
            f"--max-sequence-length {asked}: the checkpoint has a learned vector for each of its {longest} positions. "
            "Drop the flag; --sequence-length may be smaller."
        )
    if asked > longest:
        raise UserError(f"--max-sequence-length {asked} is more than the checkpoint's {longest}; it can only be less.")
