"""A model from a Hugging Face directory, each rank reading only its own part."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shiplap.checkpoint.huggingface import HuggingFaceFiles
from shiplap.checkpoint.load import check_tensors, full_shapes, load_weights
from shiplap.config import ModelParallelConfig, TransformerConfig, UserError
from shiplap.dist.collectives import Group
from shiplap.families import Stored, huggingface_names
from shiplap.families.config_json import read_config
from shiplap.models.decoder import DecoderModel, build_model
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.tensor_parallel.placement import along_tp

_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with the weights of a checkpoint.

    Attributes:
        model: this rank's shard, on the CPU in float32.
        family: a key of `shiplap.families.FAMILIES`.
        config: sizes of the full model.
    """

    model: DecoderModel
    family: str
    config: TransformerConfig


def load_huggingface(
    directory: str,
    *,
    family: str | None = None,
    config: TransformerConfig | None = None,
    parallel: ModelParallelConfig,
    group: Group,
) -> LoadedModel:
    """Build this rank's shard of the model that a Hugging Face directory holds, and fill it.

    Communicates nothing: a rank may fail alone, so run it inside `fail_together()`.

    Args:
        directory: with `config.json`, and `model.safetensors` or several files and their index.
        family: what the model must be; None: whatever `config.json` says.
        config: what `read_config` made of `config.json`, with changes that keep all parameters, such as another
            dropout; None: as the file says.
        parallel: topology and switches.
        group: the TP ranks.

    Raises:
        UserError: a file is missing, damaged or describes something that is not supported; the model is of another
            family; a tensor is missing, superfluous or has another shape; or the TP size does not divide its sizes.
    """
    family, as_stored = read_config(directory, family)
    config = config or as_stored
    config.check_divisible_by(parallel.tensor_parallel_size)
    files, has_head = open_huggingface(directory, config)
    stored = huggingface_names(family, config)
    model = build_model(family, config, parallel=parallel, group=group, seed=None)
    load_weights(model, files, stored, group=group)
    if has_head:
        for region in dict(named_placements(model))["embedding.weight"].regions(along_tp(group)):
            check_tied(files, stored, region.there[0])
    return LoadedModel(model=model, family=family, config=config)


def newest_checkpoint(directory: str) -> str:
    """The folder itself, or of the checkpoints `step-N` that a training run left in it the one with the largest N."""
    steps = {
        int(match[1]): path
        for path in Path(directory).glob("step-*/config.json")
        if (match := re.fullmatch(r"step-(\d+)", path.parent.name))
    }
    if not steps or Path(directory, "config.json").exists():
        return directory
    return str(steps[max(steps)].parent)


def check_huggingface(directory: str, *, family: str, config: TransformerConfig) -> str:
    """Find out whether a directory holds a model's weights; reads nothing but the headers of its files.

    Args:
        directory: as for `load_huggingface`.
        family: of the model.
        config: what `read_config` made of its `config.json`.

    Returns:
        What it holds, in words.

    Raises:
        UserError: a file is missing or damaged; or a tensor is missing, superfluous or has another shape.
    """
    files, _ = open_huggingface(directory, config)
    check_tensors(files, huggingface_names(family, config), full_shapes_of(family, config))
    return f"{directory}, {' and '.join(files.dtypes)} in {files.num_files} file{'s' if files.num_files > 1 else ''}"


def full_shapes_of(family: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model that is not there."""
    with torch.device("meta"):
        return full_shapes(build_model(family, config, parallel=ModelParallelConfig(), group=None, seed=None))


def open_huggingface(directory: str, config: TransformerConfig) -> tuple[HuggingFaceFiles, bool]:
    """The files, and whether they hold a tied output head a second time, which is then set aside.

    Args:
        directory: as for `load_huggingface`.
        config: what `read_config` made of its `config.json`.

    Raises:
        UserError: a file is missing or damaged, or the head has another shape.
    """
    files = HuggingFaceFiles(directory)
    if not config.tie_embeddings or _HEAD not in files.shapes:
        return files, False
    shape, expected = files.shapes[_HEAD], (config.vocab_size, config.hidden_size)
    if shape != expected:
        raise UserError(f"{directory}: tensor {_HEAD} has shape {list(shape)}, but the model needs {list(expected)}.")
    files.set_aside(_HEAD)
    return files, True


def check_tied(files: HuggingFaceFiles, stored: Mapping[str, Stored], rows: slice) -> None:
    """Make sure that rows of a head that is tied, and stored all the same, are those of the embedding.

    Where they differ the model is not what `config.json` says it is. transformers would then leave it untied.

    Args:
        files: with the head set aside.
        stored: where each parameter stands.
        rows: which to compare.

    Raises:
        UserError: they differ.
    """
    [(embedding, _)] = stored["embedding.weight"].parts
    index = (rows, slice(None))
    head, table = files.read(_HEAD, index), files.read(embedding, index)
    if head.dtype != table.dtype or not torch.equal(head, table):
        raise UserError(
            f"{files.path}: config.json says tie_word_embeddings, but {_HEAD} differs from the embedding. Remove the "
            "tensor, or set tie_word_embeddings to false in config.json."
        )
