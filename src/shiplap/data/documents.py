"""Which files make up a text corpus, and in which order."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shiplap.config import UserError

# Not the standard library itself, or its tests, which hold long tables of odd characters.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

# Git's rule for "binary": a NUL byte near the start. Looking at whole files would make opening a corpus slow.
_PROBED_BYTES = 8000


class Document(NamedTuple):
    """One file of a corpus.

    Attributes:
        path: where it is.
        size: in bytes, at least 1.
        modified: time of the last change, in nanoseconds.
    """

    path: Path
    size: int
    modified: int


def list_documents(entries: tuple[str, ...]) -> list[Document]:
    """The files that `--data` names, in a fixed order; only listed and probed, not read.

    Args:
        entries: files; folders, which stand for every file in them, sorted by relative path, without hidden
            and empty ones; and the word `stdlib`, for the `.py` files of Python's standard library without
            its tests (a folder of that name is `./stdlib`).

    Raises:
        UserError: an entry is missing, unreadable, or holds no text; or a file is binary, that is, has a NUL
            byte among its first 8000 bytes.
    """
    documents: list[Document] = []
    for entry in entries:
        found = _stdlib() if entry == "stdlib" else _named(Path(entry))
        if not found:
            raise UserError(f"--data {entry}: empty, there is no text in it.")
        documents += found
    if not documents:
        raise UserError("--data names no file or folder.")
    return documents


def _stdlib() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return _sorted_documents(root, (path for path in _files_under(root, skipped=_NOT_STDLIB) if path.suffix == ".py"))


def _named(path: Path) -> list[Document]:
    if path.is_dir():
        files = (file for file in _files_under(path, skipped=set()) if not file.name.startswith("."))
        documents = _sorted_documents(path, files)
    elif path.is_file():
        documents = _sorted_documents(path.parent, iter([path]))
    else:
        raise UserError(f"--data {path}: no such file or folder.")
    for document in documents:
        _refuse_binary(document.path)
    return documents


def _files_under(root: Path, *, skipped: set[str]) -> Iterator[Path]:
    """Every regular file under `root`, but not in hidden or `skipped` folders."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        yield from (path for path in map(Path(folder).joinpath, files) if path.is_file())


def _sorted_documents(root: Path, files: Iterator[Path]) -> list[Document]:
    paths = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    documents = (Document(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in [path.stat()])
    return [document for document in documents if document.size > 0]


def _refuse_binary(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(_PROBED_BYTES)
    except OSError as error:
        raise UserError(f"--data: cannot read {path}: {error.strerror}.") from None
    if b"\0" in start:
        raise UserError(
            f"--data: {path} is binary (NUL byte at {start.index(0)}). Leave it out; token files in llm.c's "
            "format go to --input-bin."
        )
