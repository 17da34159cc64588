"""Token files in llm.c's format."""

from pathlib import Path

import numpy as np
import pytest

from shiplap.config import UserError
from shiplap.data import TokenFile, write_token_file
from shiplap.data import token_file as token_file_module

HEADER_BYTES = 1024


def _header(*first: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[: len(first)] = first
    return header.tobytes()


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "dtype"),
    [(50257, 20240520, 1, "<u2"), (65536, 20240520, 1, "<u2"), (128256, 20240801, 7, "<u4")],
)
def test_written_file_has_the_published_layout(
    tmp_path: Path, *, vocab_size: int, magic: int, version: int, dtype: str
) -> None:
    path = tmp_path / "tokens.bin"
    write_token_file(path, [[0, 5], [], [vocab_size - 1]], vocab_size=vocab_size)
    tokens = np.array([0, 5, vocab_size - 1], dtype=dtype)
    assert path.read_bytes() == _header(magic, version, 3) + tokens.tobytes()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_what_was_written_reads_back(tmp_path: Path, vocab_size: int) -> None:
    tokens = np.random.default_rng(0).integers(vocab_size, size=1000)
    write_token_file(tmp_path / "tokens.bin", np.split(tokens, [1, 10, 500]), vocab_size=vocab_size)
    source = TokenFile(tmp_path / "tokens.bin")
    assert len(source) == 1000
    piece = source.read(490, 20)
    assert piece.dtype == np.int64
    np.testing.assert_array_equal(piece, tokens[490:510])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"x" * 100, "truncated: 100 bytes, where the header alone takes 1024"),
        (_header(20240520, 1, 0), "empty: its header counts 0 tokens"),
        (_header(20240520, 1, 10) + b"x" * 18, "truncated: .* 10 tokens, which makes 1044 bytes, .* has 1042"),
        (_header(20240801, 7, 2) + b"x" * 10, "too long: .* 2 tokens, which makes 1032 bytes, .* has 1034"),
        (_header(20240326, 3, 1024), r"magic number is 20240326, not 20240520 \(GPT-2\) or 20240801"),
        (_header(20240520, 7, 1), "version 7, where magic 20240520 has version 1"),
        (_header(20240801, 1, 1), "version 1, where magic 20240801 has version 7"),
    ],
)
def test_bad_file_is_refused_by_flag_name_and_both_numbers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"--input-bin .*tokens.bin: .*{message}"):
        TokenFile(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--input-bin .*nowhere.bin: cannot read it: No such file"):
        TokenFile(tmp_path / "nowhere.bin")


def test_failed_write_leaves_neither_a_file_nor_rubbish(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        write_token_file(tmp_path / "tokens.bin", [[1], [300]], vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_more_tokens_than_the_header_can_count_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file_module, "_MAX_TOKENS", 3)
    with pytest.raises(UserError, match=r"--data: .*tokens.bin cannot hold more than 3 tokens.* at least 4"):
        write_token_file(tmp_path / "tokens.bin", [[1, 2], [3, 4]], vocab_size=300)
