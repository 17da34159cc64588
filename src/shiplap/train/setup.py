"""Everything that can be checked and opened before the first step, by the process that starts workers and by each."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shiplap.checkpoint import check_huggingface, read_adapters
from shiplap.checkpoint.llmc_header import read_llmc_header
from shiplap.checkpoint.sizes import sizes_of_run
from shiplap.config import TrainConfig, TransformerConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.config.option import flags_of
from shiplap.data import ByteTokenizer, Data, open_data
from shiplap.dist import GlobalEnv, RankLayout
from shiplap.dist.agreement import fail_together
from shiplap.dist.launch import agreed_env
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.inspection.strict import check_strict
from shiplap.lora import Adapters, find_targets
from shiplap.lora.targets import ALL_LINEAR
from shiplap.train.determinism import check_environment, reproducible
from shiplap.train.folders import check_save_folders
from shiplap.tuning.measured import MeasuredPlan
from shiplap.tuning.progress import showing_progress
from shiplap.tuning.run import check_same_plan, found_or_measured, given_plan

# Files that a tokenizer may consist of, of which shiplap can read none.
_OTHER_TOKENIZERS = ("vocab.json", "merges.txt", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run whose parts are known to fit together.

    Attributes:
        family: the model's family, such as `gpt2`.
        config: what was asked for; the tokenizer is the checkpoint's where nothing else was said.
        model: the model's sizes.
        weights: where the weights come from, in words.
        adapters: what is trained instead of the model's own weights; None: those are.
        plan: a measured one; None: layers keep to the switches, or it is yet to be measured.
        data: the opened corpus, as one data-parallel rank sees it.
        num_micro_batches: per rank and optimizer step.
        tokens_per_step: over all ranks.
    """

    family: str
    config: TrainConfig
    model: TransformerConfig
    weights: str
    adapters: Adapters | None
    plan: MeasuredPlan | None
    data: Data
    num_micro_batches: int
    tokens_per_step: int


def set_up(family: str, config: TrainConfig, *, layout: RankLayout, data_parallel_rank: int) -> Setup:
    """Check the sizes against each other and open the data. Communicates nothing.

    Raises:
        UserError: sizes that do not fit together, switches that --tp-comm-strict refuses, or data that cannot be used.
    """
    model, adapters = resolve_structure(family, config)
    weights = f"drawn with --seed {config.run.seed}"
    if config.model.hf_checkpoint is not None:
        weights = "from " + check_huggingface(config.model.hf_checkpoint, family=family, config=model)
        config = _with_tokenizer(config, config.model.hf_checkpoint)
        _check_tokenizer(config, f"--hf-checkpoint {config.model.hf_checkpoint}", vocab_size=model.vocab_size)
    if config.model.llmc_filepath is not None:
        weights = f"from {config.model.llmc_filepath}, {read_llmc_header(config.model.llmc_filepath).dtype}"
        _check_tokenizer(config, f"--llmc-filepath {config.model.llmc_filepath}", vocab_size=model.vocab_size)
    check_save_folders(config, family=family, model=model)
    plan = None
    if config.parallel.tp_comm_strict or config.plan.tp_comm_plan is not None:
        bones = skeleton(family, config, model=model, adapters=adapters)
        plan = given_plan(config, bones, layout)
        if plan is not None:
            plan.apply(bones)
        # Of a plan that is yet to be measured nothing is known.
        if not config.plan.is_auto:
            check_strict(config.parallel, sites_of_run(bones, config))
    options = config.data
    num_micro_batches = options.num_micro_batches(layout.data_size)
    data = open_data(
        options,
        vocab_size=model.vocab_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=layout.data_size,
        seed=config.run.seed,
        validation=config.run.val_loss_every > 0,
    )
    return Setup(
        family=family,
        config=config,
        model=model,
        weights=weights,
        adapters=adapters,
        plan=plan,
        data=data,
        num_micro_batches=num_micro_batches,
        tokens_per_step=num_micro_batches * options.batch_size * options.sequence_length * layout.data_size,
    )


def with_plan(setup: Setup, env: GlobalEnv) -> Setup:
    """The run with the plan of `--tp-comm-plan`. All ranks call this together.

    Raises:
        AgreedError: on every rank, if ranks were given different plans, what is kept of earlier runs cannot be used, or
            the plan leaves a switch without effect that `--tp-comm-strict` wants to act.
    """
    config = setup.config
    if config.plan.tp_comm_plan is None:
        return setup
    if not config.plan.is_auto:
        check_same_plan(config, setup.plan)
        return setup
    bones = skeleton(setup.family, config, model=setup.model, adapters=setup.adapters, rank=env.coordinate("tp"))
    with showing_progress("measuring what overlaps best", is_shown=env.rank == 0) as progress:
        plan = found_or_measured(config, bones, env, progress)
    plan.apply(bones)
    with fail_together():
        check_strict(config.parallel, sites_of_run(bones, config))
    return dataclasses.replace(setup, plan=plan)


def resolve_structure(family: str, config: TrainConfig) -> tuple[TransformerConfig, Adapters | None]:
    """The model's sizes and what is trained beside its weights, checked against the topology.

    Needs no data, and of a checkpoint the headers only.

    Raises:
        UserError: sizes that do not fit together.
    """
    stages = config.parallel.pipeline_parallel_size
    if stages > 1:
        raise UserError(f"--pipeline-parallel {stages} is not supported by train yet; use 1.")
    model = sizes_of_run(config.model, family)
    model.check_divisible_by(config.parallel.tensor_parallel_size)
    if config.data.sequence_length > model.max_sequence_length:
        raise UserError(
            f"--sequence-length {config.data.sequence_length} is longer than the model's --max-sequence-length "
            f"{model.max_sequence_length}. Shorten the one, or raise the other."
        )
    return model, _adapters(config.lora, family, model)


def _adapters(options: LoraOptions, family: str, model: TransformerConfig) -> Adapters | None:
    """The adapters that were asked for; of those on disk, headers are read and compared with the model."""
    if not options.is_on:
        return None
    if options.lora_load_path is not None:
        loaded = read_adapters(options.lora_load_path, family=family, config=model)
        options.check_agrees_with(rank=loaded.rank, alpha=loaded.alpha)
        dropout = options.lora_dropout
        return loaded if dropout is None else dataclasses.replace(loaded, dropout=dropout)
    assert options.lora_rank is not None
    return Adapters(
        targets=tuple(find_targets(family, model, options.lora_target_modules or (ALL_LINEAR,))),
        rank=options.lora_rank,
        alpha=options.lora_alpha or options.DEFAULT_ALPHA,
        dropout=options.lora_dropout or 0.0,
    )


def _with_tokenizer(config: TrainConfig, directory: str) -> TrainConfig:
    """Text is read with the checkpoint's tokenizer, unless another one was asked for."""
    if config.data.tokenizer is not None or config.data.input_bin is not None:
        return config
    if (Path(directory) / "tokenizer.json").is_file():
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=directory))
    if others := [name for name in _OTHER_TOKENIZERS if (Path(directory) / name).is_file()]:
        raise UserError(
            f"--hf-checkpoint {directory} holds {others[0]} but no tokenizer.json, which is the only form that shiplap "
            "reads. Give --tokenizer FILE, or tokens with --input-bin."
        )
    return config


def _check_tokenizer(config: TrainConfig, checkpoint: str, *, vocab_size: int) -> None:
    """Few models read bytes: without a tokenizer most would be trained on nonsense."""
    num_bytes = ByteTokenizer().vocab_size
    if config.data.tokenizer is None and config.data.input_bin is None and vocab_size != num_bytes:
        raise UserError(
            f"{checkpoint} has a vocabulary of {vocab_size} tokens, so it does not read bytes (that is {num_bytes}), "
            "and there is no tokenizer with it. Give its tokenizer.json with --tokenizer, say --tokenizer bytes if it "
            "was trained on bytes all the same, or give tokens with --input-bin."
        )


@contextmanager
def joined_run(family: str, config: TrainConfig) -> Iterator[GlobalEnv]:
    """Agree with the other ranks on what was asked for, and compute as `--deterministic` says while inside.

    Args:
        family: a key of `shiplap.families.FAMILIES`.
        config: the run; a verb may have added options of its own. All ranks must be started with the same.

    Raises:
        AgreedError: on every rank, if ranks were started with different options, or the environment of one contradicts
            `--deterministic`.
    """
    settings = {"the model": family} | flags_of(config)
    agreed = agreed_env(config.parallel, device=config.run.device, settings=settings)
    with agreed as env, reproducible(config.run):
        with fail_together():
            check_environment(config.run)
        yield env
