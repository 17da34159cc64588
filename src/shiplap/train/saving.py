"""Save what a run has made: the model, its adapters."""

from pathlib import Path

from shiplap.checkpoint import save_adapters, save_huggingface
from shiplap.data import BYTES
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.dist.collectives import Group
from shiplap.lora import merged
from shiplap.models.decoder import DecoderModel
from shiplap.train.save_folders import adapters_folder, is_save_due, step_folder
from shiplap.train.setup import Setup


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
