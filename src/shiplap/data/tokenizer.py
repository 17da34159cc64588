"""Text to token ids and back."""

import hashlib
from pathlib import Path
from typing import Protocol

from shiplap.config import UserError

# The names under which published tokenizers carry "the document ends here"; the first that exists is used.
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>")


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    Attributes:
        vocab_size: the smallest vocabulary that covers every id, in tokens.
        end_of_text: the id that stands between documents, or None where the tokenizer has none.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, with no special token added."""

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of a text to go on with, as models of this tokenizer expect a text to begin."""

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; never fails, whatever ids a model comes up with."""


class ByteTokenizer:
    """One token a byte of UTF-8, and id 256 for the end of text."""

    END_OF_TEXT = 256

    def __init__(self) -> None:
        """Needs nothing."""
        self.vocab_size = 257
        self.end_of_text: int | None = self.END_OF_TEXT

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        """The bytes of `text`: nothing marks where a text begins."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`: an end of text becomes a line break, what is not text becomes U+FFFD."""
        return b"".join(self._byte_of(index) for index in ids).decode(errors="replace")

    def _byte_of(self, index: int) -> bytes:
        if index == self.END_OF_TEXT:
            return b"\n"
        # A model with a larger vocabulary may sample ids that stand for no byte; 0xff is never valid UTF-8.
        return bytes([index]) if index < self.END_OF_TEXT else b"\xff"


class HuggingFaceTokenizer:
    """A `tokenizer.json` read with the `tokenizers` library.

    Args:
        path: the file, or a folder that holds a `tokenizer.json`.

    Attributes:
        vocab_size: largest id + 1; ids may have gaps, so this can exceed the number of entries.
        end_of_text: the id of the first of `<|endoftext|>`, `<|end_of_text|>`, `</s>`, `<|im_end|>`, or None.
        fingerprint: SHA-256 of the file, in hexadecimal.

    Raises:
        UserError: the file is missing or is no tokenizer, or the `tokenizers` library is not installed.
    """

    def __init__(self, path: str) -> None:
        """Read the file."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise UserError(f"--tokenizer {path} needs the tokenizers library: pip install 'shiplap[train]'.") from None
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UserError(f"--tokenizer: cannot read {file}: {error.strerror}.") from None
        try:
            self._backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises plain `Exception`, whatever is wrong
            raise UserError(f"--tokenizer: {file} is not a Hugging Face tokenizer.json: {error}.") from None
        # A tokenizer.json may ask for both; truncation would silently drop most of every document.
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        found = [vocabulary[name] for name in _END_OF_TEXT_NAMES if name in vocabulary]
        self.end_of_text: int | None = found[0] if found else None
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, with no special token added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of `text`, with the special tokens that the file asks for, such as LLaMA's begin of text."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens, and ids that the tokenizer does not know, are left out."""
        return self._backend.decode(ids)


BYTES = "bytes"
"""Says `--tokenizer`, for a model that reads bytes."""


def open_tokenizer(asked: str) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer that `--tokenizer` names.

    Args:
        asked: a `tokenizer.json`, or a folder that holds one; or `bytes`.

    Raises:
        UserError: the file is missing or is no tokenizer, or the `tokenizers` library is not installed.
    """
    return ByteTokenizer() if asked == BYTES else HuggingFaceTokenizer(asked)
