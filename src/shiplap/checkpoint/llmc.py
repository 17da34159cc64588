"""llm.c's model files, read where they stand on disk."""

import mmap
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shiplap.checkpoint.llmc_header import read_llmc_header
from shiplap.checkpoint.load import load_weights
from shiplap.checkpoint.pretrained import LoadedModel
from shiplap.config import ModelParallelConfig, TransformerConfig
from shiplap.dist.collectives import Group
from shiplap.families import llmc_names
from shiplap.models.decoder import build_model


class LlmcFiles:
    """The tensors of a model file, memory-mapped: only what is read is copied.

    Of the format, which `shiplap.checkpoint.llmc_header` describes, two things do not show: the rows that pad an
    embedding are left out, and the rows of queries and keys come in Hugging Face's order.

    Attributes:
        path: the file.
        family: `gpt2` or `llama3`.
        config: the model's sizes.
        dtype: of all tensors.
        shapes: of every tensor, by its name in llm.c's Python.
    """

    def __init__(self, path: str | Path, *, family: str | None = None) -> None:
        """Check the header against the file, and map the tensors.

        Args:
            path: the file.
            family: what the model must be; None: whatever the file says.

        Raises:
            UserError: the file is missing, truncated or too long, is no model file of a known version, or holds a
                model of another family.
        """
        header = read_llmc_header(path, family=family)
        self.path = str(path)
        self.family = header.family
        self.config = header.config
        self.dtype: torch.dtype = getattr(torch, header.dtype)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: place.shape for name, place in header.tensors.items()}
        self._places = header.tensors
        self._row_order = _half_split_order(header.config) if header.has_interleaved_heads else None
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes to it
            self._elements = torch.frombuffer(mapped, dtype=self.dtype, offset=header.num_bytes)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A copy of a part of a tensor, one slice for each of its dims, in the file's dtype."""
        start, shape = self._places[name]
        tensor = self._elements[start : start + prod(shape)].view(shape)
        if self._row_order is not None and name.endswith("c_attn.weight"):
            return tensor[self._row_order[index[0]], index[1]]
        return tensor[index].clone()


def load_llmc(
    path: str,
    *,
    family: str | None = None,
    config: TransformerConfig | None = None,
    parallel: ModelParallelConfig,
    group: Group,
) -> LoadedModel:
    """Build this rank's shard of the model that an llm.c model file holds, and fill it.

    Communicates nothing: a rank may fail alone, so run it inside `fail_together()`.

    Args:
        path: the file.
        family: what the model must be; None: whatever the file says.
        config: the file's sizes, with changes that keep all parameters, such as another dropout; None: as in the file.
        parallel: topology and switches.
        group: the TP ranks.

    Raises:
        UserError: the file is missing, truncated or too long, or is no model file of a known version; the model is of
            another family; or the TP size does not divide its sizes.
    """
    files = LlmcFiles(path, family=family)
    config = config or files.config
    model = build_model(files.family, config, parallel=parallel, group=group, seed=None)
    load_weights(model, files, llmc_names(files.family, config), group=group)
    return LoadedModel(model=model, family=files.family, config=config)


def _half_split_order(config: TransformerConfig) -> Tensor:
    """For each row of the fused QKV in Hugging Face's order, where it stands in the file.

    There the two elements of a rotary pair come together, here they are half a head apart (`shiplap.layers.positions`).
    """
    size, keys = config.head_size, config.key_value_heads
    turned, values = torch.arange((config.num_attention_heads + 2 * keys) * size).tensor_split([-keys * size])
    return torch.cat([turned.view(-1, size // 2, 2).transpose(1, 2).flatten(), values])
