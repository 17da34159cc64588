"""Fill a model from files, each rank reading only what it holds."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shiplap.config import UserError
from shiplap.dist.collectives import Group, rank_in, size_of
from shiplap.models.stored import Stored
from shiplap.tensor_parallel.placement import named_shards


class TensorFiles(Protocol):
    """Named tensors on disk, of which any part can be read.

    Attributes:
        path: the file or folder, for messages.
        shapes: of every tensor.
    """

    path: str
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, one slice for each of its dims, as it stands in the file."""


def full_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, as a whole."""
    parameters = dict(model.named_parameters())
    return {
        name: tuple(parameters[name].shape) if shard is None else shard.full_shape
        for name, shard in named_shards(model)
    }


def check_tensors(files: TensorFiles, stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Make sure that the files hold every tensor of the model in its shape, and nothing else.

    Args:
        files: what is on disk.
        stored: where each parameter stands.
        expected: the full shape of each parameter.

    Raises:
        UserError: names the tensor, and both shapes where they differ.
    """
    shapes = {
        name: shape for parameter, where in stored.items() for name, shape in _stored_shapes(where, expected[parameter])
    }
    for name, shape in shapes.items():
        if name not in files.shapes:
            raise UserError(f"{files.path}: tensor {name} is missing; the model needs it, with shape {list(shape)}.")
        if files.shapes[name] != shape:
            raise UserError(
                f"{files.path}: tensor {name} has shape {list(files.shapes[name])}, but the model needs {list(shape)}."
            )
    if extra := sorted(files.shapes.keys() - shapes.keys()):
        raise UserError(f"{files.path}: the model has no place for tensor {', '.join(extra[:5])}.")


def _stored_shapes(where: Stored, full_shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in where.parts:
        shape = (rows, *full_shape[1:])
        yield name, shape[::-1] if where.transposed else shape


@torch.no_grad()
def load_weights(model: nn.Module, files: TensorFiles, stored: Mapping[str, Stored], *, group: Group) -> None:
    """Fill this rank's shards. No more than one slice of one tensor is held besides them.

    Args:
        model: this rank's shard of the model, built with `draw=False`; parameters of any dtype.
        files: what is on disk.
        stored: where each parameter stands; those that are not in it stay as they are.
        group: the TP ranks.

    Raises:
        UserError: a tensor is missing, superfluous or has another shape.
    """
    parameters = dict(model.named_parameters())
    shards = dict(named_shards(model))
    expected = full_shapes(model)
    check_tensors(files, stored, expected)
    for name in stored:
        shard = shards[name]
        dim, ranges = 0, [range(expected[name][0])]
        if shard is not None:
            dim, ranges = shard.dim, [*shard.ranges(rank_in(group), size_of(group))]
        parameter = parameters[name]
        parameter.zero_()  # what pads a shard
        start = 0
        for part in ranges:
            _read_range(parameter.narrow(dim, start, len(part)), files, stored[name], dim=dim, part=part)
            start += len(part)


def _read_range(out: Tensor, files: TensorFiles, where: Stored, *, dim: int, part: range) -> None:
    """Read the range `part` along `dim` of a whole parameter into `out`."""
    begin = 0
    for name, rows in where.parts:
        # Of this stored tensor, which stands at rows begin … begin + rows of the parameter.
        wanted = range(max(part.start - begin, 0), min(part.stop - begin, rows)) if dim == 0 else range(rows)
        if len(wanted):
            index = [slice(None)] * out.ndim
            index[0] = slice(wanted.start, wanted.stop)
            if dim == 1:
                index[1] = slice(part.start, part.stop)
            there = max(begin - part.start, 0) if dim == 0 else begin
            tensor = files.read(name, tuple(reversed(index)) if where.transposed else tuple(index))
            out[there : there + len(wanted)] = tensor.t() if where.transposed else tensor
        begin += rows
