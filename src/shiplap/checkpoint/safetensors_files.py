"""Tensors in safetensors files, read in part from mapped files; nothing is ever unpickled."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shiplap.config import UserError

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class SafetensorsFiles:
    """The tensors of some files: only what is read is in memory.

    Attributes:
        path: the directory that holds the files.
        shapes: of every tensor.
        num_files: that hold them.
        dtypes: in which they are stored, by name, such as `float32`.
    """

    def __init__(
        self, path: str, files: Sequence[Path], name_of: Callable[[str], str | None] = lambda name: name
    ) -> None:
        """Open all files and read their headers.

        Args:
            path: the directory, for messages.
            files: those in it that hold tensors.
            name_of: what a tensor is called here, from its name in the file; None: it is left out.

        Raises:
            UserError: safetensors is not installed; a file is missing, damaged, or not safetensors; a tensor comes
                twice, or is of a dtype other than float32, bfloat16 and float16.
        """
        self.path = path
        shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Any, str]] = {}
        dtypes = set()
        for file in files:
            opened = _open(file)
            for stored_name in opened.keys():  # noqa: SIM118 - not a dictionary
                name = name_of(stored_name)
                if name is None:
                    continue
                tensor = opened.get_slice(stored_name)
                if tensor.get_dtype() not in _DTYPES:
                    raise UserError(
                        f"{file}: tensor {stored_name} is stored as {tensor.get_dtype()}; shiplap reads float32, "
                        "bfloat16 and float16."
                    )
                if name in shapes:
                    raise UserError(f"{file}: tensor {stored_name} is in {path} a second time. Remove one.")
                shapes[name] = tuple(tensor.get_shape())
                self._places[name] = (opened, stored_name)
                dtypes.add(_DTYPES[tensor.get_dtype()])
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        self.num_files = len(files)
        self.dtypes = sorted(dtypes)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, one slice for each of its dims, in the file's dtype; a view of the mapped file."""
        opened, stored_name = self._places[name]
        part: Tensor = opened.get_slice(stored_name)[index]
        return part


def _open(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError(f"{file}: reading it needs safetensors: pip install 'shiplap[train]'.") from None
    try:
        return safe_open(str(file), framework="pt")
    except OSError as error:
        raise UserError(f"{file}: cannot read it: {error}.") from None
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or not a safetensors file: {error}. Is the download complete?") from None
