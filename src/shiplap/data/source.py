"""What every corpus looks like from outside: a long row of token ids, read at any place."""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenSource(Protocol):
    """A corpus as one row of token ids, on disk; reading a piece never loads the rest."""

    @property
    def name(self) -> str:
        """The flag and the file or folder, for error messages: `--input-bin tokens.bin`."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """The tokens `[start, start + count)`, shape `[count]`; the range must lie inside the source."""
