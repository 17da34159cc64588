"""A model on disk, of whatever format, as one whole parameter after the other. The model itself is never built."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shiplap.checkpoint.llmc import LlmcFiles
from shiplap.checkpoint.load import TensorFiles, check_tensors
from shiplap.checkpoint.pretrained import check_tied, full_shapes_of, open_huggingface
from shiplap.config import TransformerConfig, UserError
from shiplap.families import Stored, huggingface_names, llmc_names
from shiplap.families.config_json import CONFIG_FILE, read_config

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on disk, all of whose tensors are known to be there.

    Attributes:
        family: a key of `shiplap.families.FAMILIES`.
        config: sizes of the model.
        num_elements: in all its parameters.
        files: its tensors.
        stored: where each parameter stands in them.
    """

    family: str
    config: TransformerConfig
    num_elements: int
    files: TensorFiles
    stored: Mapping[str, Stored]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole and in the dtype of the files, by its name in the model; one at a time."""
        for name, where in self.stored.items():
            yield name, _whole(self.files, where)


def open_stored_model(path: str) -> StoredModel:
    """Open a model, and check that it is all there; reads little more than headers.

    Args:
        path: a Hugging Face directory, or an llm.c model file.

    Raises:
        UserError: there is no such thing, it is damaged, describes something that is not supported, or a tensor is
            missing, superfluous or has another shape.
    """
    if not Path(path).is_dir():
        llmc = LlmcFiles(path)
        return _checked(llmc, llmc.family, llmc.config, stored=llmc_names(llmc.family, llmc.config))
    if not (Path(path) / CONFIG_FILE).exists():
        raise UserError(
            f"{path}: neither a Hugging Face directory, since there is no {CONFIG_FILE}, nor a folder of checkpoints "
            "step-N. Name one of these, or an llm.c model file."
        )
    family, config = read_config(path, None)
    files, has_head = open_huggingface(path, config)
    model = _checked(files, family, config, stored=huggingface_names(family, config))
    if has_head:
        for start in range(0, config.vocab_size, _ROWS_AT_A_TIME):
            check_tied(files, model.stored, slice(start, min(start + _ROWS_AT_A_TIME, config.vocab_size)))
    return model


def _checked(
    files: TensorFiles, family: str, config: TransformerConfig, *, stored: Mapping[str, Stored]
) -> StoredModel:
    shapes = full_shapes_of(family, config)
    check_tensors(files, stored, shapes)
    num_elements = sum(map(prod, shapes.values()))
    return StoredModel(family=family, config=config, num_elements=num_elements, files=files, stored=stored)


def _whole(files: TensorFiles, where: Stored) -> Tensor:
    parts = [files.read(name, (slice(None),) * len(files.shapes[name])) for name, _ in where.parts]
    if where.transposed:
        parts = [part.t() for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
