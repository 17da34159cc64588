"""Everything that can be checked and opened before the first step, by the process that starts workers and by each."""

import dataclasses
from dataclasses import dataclass

from shiplap.config import TrainConfig, TransformerConfig, UserError
from shiplap.config.option import flag_of
from shiplap.data import Data, open_data
from shiplap.topology import RankLayout


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run whose parts are known to fit together.

    Attributes:
        family: the model's family, such as `gpt2`.
        config: what was asked for.
        model: the model's sizes.
        data: the opened corpus, as one data-parallel rank sees it.
        num_micro_batches: per rank and optimizer step.
        tokens_per_step: over all ranks.
    """

    family: str
    config: TrainConfig
    model: TransformerConfig
    data: Data
    num_micro_batches: int
    tokens_per_step: int


def set_up(family: str, config: TrainConfig, *, layout: RankLayout, data_parallel_rank: int) -> Setup:
    """Check the sizes against each other and open the data. Communicates nothing.

    Raises:
        UserError: sizes that do not fit together, or data that cannot be used.
    """
    stages = config.parallel.pipeline_parallel_size
    if stages > 1:
        raise UserError(f"--pipeline-parallel {stages} is not supported by train yet; use 1.")
    model = config.model.resolve(family)
    model.check_divisible_by(layout.tp)
    options = config.data
    if options.sequence_length > model.max_sequence_length:
        raise UserError(
            f"--sequence-length {options.sequence_length} is longer than the model's --max-sequence-length "
            f"{model.max_sequence_length}. Shorten the one, or raise the other."
        )
    num_micro_batches = options.num_micro_batches(layout.dp)
    data = open_data(
        options,
        vocab_size=model.vocab_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=layout.dp,
        seed=config.run.seed,
        validation=config.run.val_loss_every > 0,
    )
    return Setup(
        family=family,
        config=config,
        model=model,
        data=data,
        num_micro_batches=num_micro_batches,
        tokens_per_step=num_micro_batches * options.batch_size * options.sequence_length * layout.dp,
    )


def settings(family: str, config: TrainConfig) -> dict[str, object]:
    """Everything that was asked for, by the name of its flag; all ranks must be started with the same."""
    flags: dict[str, object] = {"the model": family}
    for group in dataclasses.fields(config):
        options = getattr(config, group.name)
        flags |= {flag_of(field): getattr(options, field.name) for field in dataclasses.fields(options)}
    return flags
