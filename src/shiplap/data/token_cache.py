"""Text, tokenized once and kept as a token file."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from shiplap.config import UserError
from shiplap.config.option import cache_folder
from shiplap.data.documents import Document
from shiplap.data.token_file import TokenFile, write_token_file
from shiplap.data.tokenizer import HuggingFaceTokenizer

logger = logging.getLogger(__name__)

# Characters tokenized at a time. The library's own bookkeeping takes about 100 times the text (assumption).
_PIECE_CHARACTERS = 2**20
_SECONDS_BETWEEN_REPORTS = 10.0


def tokenized(documents: list[Document], tokenizer: HuggingFaceTokenizer, *, name: str) -> TokenFile:
    """The documents as a token file in the cache folder, made now unless an earlier run made it.

    The folder is `shiplap` in `$XDG_CACHE_HOME`, or else in `~/.cache`. The file's name is a hash over the
    tokenizer and over path, size and time of change of every document, so that after a change all is
    tokenized again. Between documents stands the tokenizer's end-of-text id, where it has one. Documents
    longer than a million characters go through the tokenizer in pieces, cut at line ends. Progress is logged
    at INFO.

    Args:
        documents: the files, at least one.
        tokenizer: what to tokenize them with.
        name: the flag and what was asked for, for error messages.

    Raises:
        UserError: a document is not UTF-8, or the cache folder cannot be written.
    """
    path = cache_folder() / f"tokens-{_fingerprint(documents, tokenizer)}.bin"
    if not path.exists():
        logger.info("Tokenizing %d files, once, into %s", len(documents), path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_token_file(path, _token_chunks(documents, tokenizer), vocab_size=tokenizer.vocab_size)
        except OSError as error:
            raise UserError(
                f"--tokenizer: cannot keep the tokens in {path}: {error}. Set XDG_CACHE_HOME to a folder that "
                "you can write to, with room in it."
            ) from None
    return TokenFile(path, name=f"{name}, tokenized in {path}")


def _fingerprint(documents: list[Document], tokenizer: HuggingFaceTokenizer) -> str:
    files = [(str(document.path.absolute()), document.size, document.modified) for document in documents]
    return hashlib.sha256(json.dumps([tokenizer.fingerprint, files]).encode()).hexdigest()


def _token_chunks(documents: list[Document], tokenizer: HuggingFaceTokenizer) -> Iterator[list[int]]:
    num_bytes = sum(document.size for document in documents)
    num_done = 0
    reported = time.monotonic()
    for index, document in enumerate(documents):
        if index > 0 and tokenizer.end_of_text is not None:
            yield [tokenizer.end_of_text]
        for text in _pieces(document.path):
            yield tokenizer.encode(text)
            num_done += len(text.encode())
            if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                logger.info("Tokenized %.1f of %.1f MB", num_done / 1e6, num_bytes / 1e6)


def _pieces(path: Path) -> Iterator[str]:
    # `newline=""` keeps line ends as they are in the file.
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while text := file.read(_PIECE_CHARACTERS) + file.readline():
                yield text
        except UnicodeDecodeError as error:
            raise UserError(
                f"--data: {path} is not UTF-8 ({error.reason}), which --tokenizer needs. Convert it, leave it "
                "out, or train on bytes, without --tokenizer."
            ) from None
