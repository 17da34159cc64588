"""Text files as one row of bytes, joined without being copied."""

import numpy as np
import numpy.typing as npt

from shiplap.config import UserError
from shiplap.data.documents import Document
from shiplap.data.tokenizer import ByteTokenizer


class ByteSource:
    """The bytes of many files one after the other, with an end-of-text id between two files.

    Only names and sizes are in memory; each read opens the files that it touches.

    Args:
        documents: the files, at least one.
        name: the flag and what was asked for, for error messages.
    """

    def __init__(self, documents: list[Document], *, name: str) -> None:
        """Lay the files out in one row; reads none of them."""
        self.name = name
        self._documents = documents
        sizes = np.array([document.size for document in documents], dtype=np.int64)
        # Where each file begins in the row, and at the end where one more would begin.
        self._starts = np.concatenate([[0], np.cumsum(sizes + 1)])

    def __len__(self) -> int:
        """Number of tokens: all bytes, and the end-of-text ids between files."""
        return int(self._starts[-1]) - 1

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The tokens `[start, start + count)`, shape `[count]`.

        Raises:
            UserError: a file has become shorter since the source was made.
        """
        tokens = np.full(count, ByteTokenizer.END_OF_TEXT, dtype=np.int64)
        stop = start + count
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        for document, begin in zip(self._documents[first:last], self._starts[first:last].tolist(), strict=True):
            low, high = max(start, begin), min(stop, begin + document.size)
            if low < high:
                tokens[low - start : high - start] = _read_bytes(document, offset=low - begin, count=high - low)
        return tokens


def _read_bytes(document: Document, *, offset: int, count: int) -> npt.NDArray[np.uint8]:
    content = np.fromfile(document.path, dtype=np.uint8, count=count, offset=offset)
    if len(content) < count:
        raise UserError(
            f"--data: {document.path} has changed since it was listed: it had {document.size} bytes, now it "
            f"has {document.path.stat().st_size}."
        )
    return content
