"""Token files in llm.c's `.bin` format, read and written.

The format (karpathy/llm.c: `dev/data/data_common.py`, `llmc/dataloader.h`), little-endian: a header of 256
int32 with the magic number, the version and the number of tokens in its first three places, then the tokens.

| family | magic | version | token |
|---|---|---|---|
| GPT-2 | 20240520 | 1 | uint16 |
| LLaMA 3 | 20240801 | 7 | uint32 |
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shiplap.config import UserError

_HEADER_INTS = 256
_HEADER_BYTES = 4 * _HEADER_INTS
_MAX_TOKENS = 2**31 - 1  # the count is an int32


class _Format(NamedTuple):
    magic: int
    version: int
    dtype: np.dtype[Any]


_GPT2 = _Format(20240520, 1, np.dtype("<u2"))
_LLAMA3 = _Format(20240801, 7, np.dtype("<u4"))


class TokenFile:
    """A token file, memory-mapped.

    Args:
        path: the file.
        name: the flag and the file, for error messages; default `--input-bin PATH`.

    Raises:
        UserError: the file is missing, empty or truncated, or has another magic number or version.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Check the header against the file, and map the tokens."""
        self.name = f"--input-bin {path}" if name is None else name
        try:
            size = path.stat().st_size
            header = np.fromfile(path, dtype="<i4", count=_HEADER_INTS)
        except OSError as error:
            raise UserError(f"{self.name}: cannot read it: {error.strerror}.") from None
        if size == 0:
            raise UserError(f"{self.name}: the file is empty.")
        if size < _HEADER_BYTES:
            raise UserError(f"{self.name}: truncated: {size} bytes, where the header alone takes {_HEADER_BYTES}.")
        form = self._format(int(header[0]), int(header[1]))
        num_tokens = int(header[2])
        if num_tokens < 1:
            raise UserError(f"{self.name}: empty: its header counts {num_tokens} tokens.")
        expected = _HEADER_BYTES + num_tokens * form.dtype.itemsize
        if size != expected:
            raise UserError(
                f"{self.name}: {'truncated' if size < expected else 'too long'}: its header counts "
                f"{num_tokens} tokens, which makes {expected} bytes, but it has {size} bytes."
            )
        self._tokens = np.memmap(path, dtype=form.dtype, mode="r", offset=_HEADER_BYTES, shape=(num_tokens,))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The tokens `[start, start + count)`, shape `[count]`."""
        return self._tokens[start : start + count].astype(np.int64)

    def _format(self, magic: int, version: int) -> _Format:
        for form in (_GPT2, _LLAMA3):
            if magic == form.magic and version == form.version:
                return form
            if magic == form.magic:
                raise UserError(f"{self.name}: version {version}, where magic {magic} has version {form.version}.")
        raise UserError(
            f"{self.name}: not a token file of llm.c: its magic number is {magic}, not {_GPT2.magic} (GPT-2) "
            f"or {_LLAMA3.magic} (LLaMA 3)."
        )


def write_token_file(path: Path, chunks: Iterable[npt.ArrayLike], *, vocab_size: int) -> None:
    """Write a token file: uint16 (GPT-2's format) where the vocabulary fits, else uint32 (LLaMA 3's).

    The file appears under its name only when it is complete, so that several processes may write the same
    file at once, and readers never see half of one.

    Args:
        path: the file; its folder must exist.
        chunks: the tokens, piece by piece, each of shape `[any]`.
        vocab_size: every token is below it.

    Raises:
        UserError: more tokens than the format can count, 2**31 - 1.
    """
    form = _GPT2 if vocab_size <= 2**16 else _LLAMA3
    num_tokens = 0
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        unfinished = Path(folder, path.name)
        with unfinished.open("wb") as file:
            file.seek(_HEADER_BYTES)
            for chunk in chunks:
                tokens = np.asarray(chunk, dtype=np.int64)
                assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < vocab_size
                num_tokens += tokens.size
                if num_tokens > _MAX_TOKENS:
                    raise UserError(
                        f"--data: {path} cannot hold more than {_MAX_TOKENS} tokens, and there are at least "
                        f"{num_tokens}. Train on less text at a time."
                    )
                file.write(tokens.astype(form.dtype).tobytes())
            header = np.zeros(_HEADER_INTS, dtype="<i4")
            header[:3] = form.magic, form.version, num_tokens
            file.seek(0)
            file.write(header.tobytes())
        os.replace(unfinished, path)
