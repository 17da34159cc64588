"""Fill a model from files, each rank reading only what it holds."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shiplap.config import UserError
from shiplap.dist.collectives import Group
from shiplap.families import Stored
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.tensor_parallel.placement import along_tp


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
    return {name: placement.full_shape for name, placement in named_placements(model)}


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
        model: this rank's shard of the model, with parameters of any dtype.
        files: what is on disk.
        stored: where each parameter stands; those that are not in it stay as they are.
        group: the TP ranks.

    Raises:
        UserError: a tensor is missing, superfluous or has another shape.
    """
    parameters, placements = dict(model.named_parameters()), dict(named_placements(model))
    check_tensors(files, stored, full_shapes(model))
    for name, where in stored.items():
        parameter = parameters[name]
        parameter.zero_()  # what pads it
        for region in placements[name].regions(along_tp(group)):
            _read(parameter[region.here], files, where, region.there)


def _read(out: Tensor, files: TensorFiles, where: Stored, region: tuple[slice, ...]) -> None:
    """Read a region of a whole parameter, of which each stored tensor has some rows, into `out`."""
    rows, others = region[0], region[1:]
    begin = 0
    for name, num_rows in where.parts:
        start, stop = max(rows.start, begin), min(rows.stop, begin + num_rows)
        if start < stop:
            index = (slice(start - begin, stop - begin), *others)
            tensor = files.read(name, index[::-1] if where.transposed else index)
            out[start - rows.start : stop - rows.start] = tensor.t() if where.transposed else tensor
        begin += num_rows
