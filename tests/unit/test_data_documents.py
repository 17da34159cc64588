"""Which files `--data` stands for, and their bytes as one row."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from shiplap.config import UserError
from shiplap.data.byte_source import ByteSource
from shiplap.data.documents import list_documents

END = 256


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_folder_is_sorted_recursive_and_without_hidden_or_empty_files(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {"b.txt": b"b", "a/z.md": b"z", "a.txt": b"a", ".hidden": b"h", ".git/config": b"g", "empty": b""},
    )
    documents = list_documents((str(tmp_path),))
    assert [document.path.relative_to(tmp_path).as_posix() for document in documents] == [
        "a.txt",
        "a/z.md",
        "b.txt",
    ]
    assert [document.size for document in documents] == [1, 1, 1]


def test_entries_keep_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": b"a", "b.txt": b"b", ".named": b"n"})
    entries = tuple(str(tmp_path / name) for name in ("b.txt", ".named", "a.txt"))
    assert [str(document.path) for document in list_documents(entries)] == list(entries)


def test_stdlib_has_the_library_and_not_its_tests() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [document.path.relative_to(root).as_posix() for document in list_documents(("stdlib",))]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    forbidden = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if forbidden & set(name.split("/"))]


def test_missing_entry_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data .*nowhere.txt: no such file or folder"):
        list_documents((str(tmp_path / "nowhere.txt"),))


@pytest.mark.parametrize("name", ["empty.txt", "folder"])
def test_entry_without_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    _write(tmp_path, {"empty.txt": b"", "folder/.hidden": b"h"})
    with pytest.raises(UserError, match=rf"--data .*{name}: empty"):
        list_documents((str(tmp_path / name),))


def test_no_entry_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="--data names no file"):
        list_documents(())


def test_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": b"fine", "picture": b"PNG\0data"})
    with pytest.raises(UserError, match=r"--data: .*picture is binary \(NUL byte at 3\)"):
        list_documents((str(tmp_path),))


def test_unreadable_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {"secret.txt": b"x"})

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom no file mode stops.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"--data: cannot read .*secret.txt: Permission denied"):
        list_documents((str(tmp_path),))


def test_every_range_of_a_byte_source_reads_like_the_joined_bytes(tmp_path: Path) -> None:
    contents = [b"abc", b"d", "é\xff".encode("latin-1"), b"0123456789"]
    _write(tmp_path, {f"{index}.txt": content for index, content in enumerate(contents)})
    source = ByteSource(list_documents((str(tmp_path),)), name="--data folder")
    expected: list[int] = []
    for content in contents:
        expected += [*content, END]
    expected.pop()
    assert len(source) == len(expected)
    for start in range(len(expected)):
        for count in range(len(expected) - start + 1):
            tokens = source.read(start, count)
            assert tokens.dtype == np.int64
            assert tokens.tolist() == expected[start : start + count]


def test_file_that_shrank_is_refused_by_name_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789")
    source = ByteSource(list_documents((str(path),)), name="--data a.txt")
    path.write_bytes(b"0123")
    with pytest.raises(UserError, match=r"a.txt has changed .* 10 bytes, now it has 4"):
        source.read(2, 6)
