"""The model of a run: drawn or loaded, with or without adapters, and saved."""

from math import prod
from pathlib import Path

import torch

from shiplap.checkpoint import load_adapters, load_huggingface, load_llmc, save_adapters, save_huggingface
from shiplap.data import BYTES
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.dist.collectives import Group
from shiplap.lora import add_adapters, merged
from shiplap.models.decoder import DecoderModel, build_model
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.train.folders import adapters_folder, is_save_due, step_folder
from shiplap.train.setup import Setup


def make_model(setup: Setup, env: GlobalEnv) -> DecoderModel:
    """The model on its device; weights are alike on all replicas, dropout is not.

    Raises:
        AgreedError: on every rank, if any cannot read what it needs.
    """
    seed = setup.config.run.seed
    model = _base(setup, env)
    if setup.adapters is not None:
        _adapt(model, setup, env)
    if setup.plan is not None:
        setup.plan.apply(model)
    torch.manual_seed(seed + 1 + env.data_rank)
    return model.to(env.device)


def _base(setup: Setup, env: GlobalEnv) -> DecoderModel:
    options, parallel, group = setup.config.model, setup.config.parallel, env.group("tp")
    checkpoint = options.hf_checkpoint or options.llmc_filepath
    if checkpoint is None:
        return build_model(setup.family, setup.model, parallel=parallel, group=group, seed=setup.config.run.seed)
    load = load_huggingface if options.hf_checkpoint else load_llmc
    with fail_together():
        model = load(
            checkpoint,
            family=setup.family,
            config=setup.model,
            parallel=parallel,
            group=group,
        ).model
    return model


def _adapt(model: DecoderModel, setup: Setup, env: GlobalEnv) -> None:
    assert setup.adapters is not None
    path = setup.config.lora.lora_load_path
    if path is None:
        add_adapters(model, setup.adapters, seed=setup.config.run.seed)
        return
    with fail_together():
        load_adapters(
            model,
            path,
            family=setup.family,
            config=setup.model,
            group=env.group("tp"),
            dropout=setup.adapters.dropout,
        )


def describe(setup: Setup, model: DecoderModel) -> str:
    """How large the model and a step are, in words."""
    parameters = dict(model.named_parameters())
    sizes = {name: prod(placement.full_shape) for name, placement in named_placements(model)}
    lines = [f"{setup.family}: {sum(sizes.values()):,} parameters, {setup.weights}"]
    if setup.adapters is not None:
        trained = sum(size for name, size in sizes.items() if parameters[name].requires_grad)
        path = setup.config.lora.lora_load_path
        lines.append(
            f"LoRA: rank {setup.adapters.rank}, alpha {setup.adapters.alpha:g}, {trained:,} of them are trained, "
            + ("new" if path is None else f"from {path}")
        )
    data = setup.config.data
    lines.append(
        f"{setup.tokens_per_step:,} tokens per step: {setup.num_micro_batches} × {data.batch_size} sequences of "
        f"{data.sequence_length} tokens on each data-parallel rank"
    )
    return "\n".join(lines)


def save_what_is_due(setup: Setup, model: DecoderModel, step: int, *, env: GlobalEnv) -> list[Path]:
    """Save the model and the adapters after so many steps, if it is time and they are asked for.

    A model with adapters is saved with these merged.

    Returns:
        The folders that were written.

    Raises:
        AgreedError: on every rank, if it cannot be written.
    """
    config, group = setup.config, env.group("tp")
    saved: list[Path] = []
    if not is_save_due(config, step):
        return saved
    # One replica is enough; all of its TP ranks must take part.
    is_writing = env.is_in_first_replica
    if config.run.save is not None:
        folder = step_folder(config.run.save, step)
        with fail_together():
            if is_writing:
                with merged(model):
                    _save_model(setup, model, folder, group=group)
        saved.append(folder)
    if (path := config.lora.lora_save_path) is not None and setup.adapters is not None:
        folder = adapters_folder(path, config, step)
        with fail_together():
            if is_writing:
                save_adapters(
                    model,
                    str(folder),
                    setup.adapters,
                    family=setup.family,
                    config=setup.model,
                    group=group,
                    base_model=config.model.hf_checkpoint,
                )
        saved.append(folder)
    return saved


def _save_model(setup: Setup, model: DecoderModel, folder: Path, *, group: Group) -> None:
    tokenizer, files = setup.data.tokenizer, setup.config.data.tokenizer or setup.config.model.hf_checkpoint
    save_huggingface(
        model,
        str(folder),
        family=setup.family,
        config=setup.model,
        group=group,
        tokenizer_from=None if files == BYTES else files,
        end_of_text=None if tokenizer is None else tokenizer.end_of_text,
    )
