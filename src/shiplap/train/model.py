"""The model of a run: drawn or loaded, with or without adapters."""

from math import prod

import torch

from shiplap.checkpoint import load_adapters, load_huggingface, load_llmc
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.lora import add_adapters
from shiplap.models.decoder import DecoderModel
from shiplap.models.registry import build_model
from shiplap.tensor_parallel.placement import named_shards
from shiplap.train.setup import Setup


def make_model(setup: Setup, env: GlobalEnv) -> DecoderModel:
    """The model on its device; weights are alike on all replicas, dropout is not.

    Raises:
        AgreedError: on every rank, if any cannot read what it needs.
    """
    seed = setup.config.run.seed
    torch.manual_seed(seed)
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
        return build_model(setup.family, setup.model, parallel=parallel, group=group, recompute=options.recompute)
    load = load_huggingface if options.hf_checkpoint else load_llmc
    with fail_together():
        model = load(
            checkpoint,
            family=setup.family,
            config=setup.model,
            parallel=parallel,
            group=group,
            recompute=options.recompute,
        ).model
    return model


def _adapt(model: DecoderModel, setup: Setup, env: GlobalEnv) -> None:
    assert setup.adapters is not None
    path = setup.config.lora.lora_load_path
    if path is None:
        add_adapters(model, setup.adapters)
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
    sizes = {
        name: parameters[name].numel() if shard is None else prod(shard.full_shape)
        for name, shard in named_shards(model)
    }
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
