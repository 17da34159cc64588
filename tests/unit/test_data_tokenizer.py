"""Tokenizers, and text tokenized once into the cache."""

import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shiplap.config import UserError
from shiplap.data import ByteTokenizer, HuggingFaceTokenizer, token_cache
from shiplap.data.documents import list_documents
from shiplap.data.token_cache import tokenized

TEXT = "the cat sat on the mat, and the hat was flat\nünïcode 🚢 too\n"


def _train(end_of_text: str | None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[] if end_of_text is None else [end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


@pytest.fixture
def backend() -> Tokenizer:
    return _train("<|endoftext|>")


@pytest.fixture
def tokenizer(backend: Tokenizer, tmp_path: Path) -> HuggingFaceTokenizer:
    backend.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shiplap"


def test_bytes_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_decode_whatever_a_model_samples() -> None:
    # The end of text is a line break; a broken UTF-8 sequence and ids beyond the bytes become U+FFFD.
    assert ByteTokenizer().decode([97, 256, 98, 195, 50256, 99]) == "a\nb��c"


def test_hugging_face_tokenizer_there_and_back(backend: Tokenizer, tokenizer: HuggingFaceTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    assert max(ids) < tokenizer.vocab_size == backend.get_vocab_size()
    end = backend.token_to_id("<|endoftext|>")
    assert end is not None
    assert tokenizer.end_of_text == end
    assert tokenizer.decode([*ids, end, 10**6]) == TEXT


def test_folder_stands_for_the_tokenizer_json_in_it(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    assert HuggingFaceTokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<|im_end|>", None])
def test_end_of_text_is_found_under_its_published_names(tmp_path: Path, name: str | None) -> None:
    backend = _train(name)
    backend.save(str(tmp_path / "tokenizer.json"))
    expected = None if name is None else backend.token_to_id(name)
    assert HuggingFaceTokenizer(str(tmp_path)).end_of_text == expected


def test_vocab_size_covers_the_largest_id_over_gaps(backend: Tokenizer, tmp_path: Path) -> None:
    state = json.loads(backend.to_str())
    state["model"]["vocab"]["gap"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert HuggingFaceTokenizer(str(tmp_path)).vocab_size == 1000


def test_truncation_padding_and_special_tokens_of_the_file_are_not_applied(backend: Tokenizer, tmp_path: Path) -> None:
    expected = backend.encode(TEXT).ids
    backend.add_special_tokens([AddedToken("[PAD]", special=True)])
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(str(tmp_path)).encode(TEXT) == expected


def test_bad_tokenizers_are_refused_by_flag_and_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"--tokenizer: cannot read .*nowhere.json: No such file"):
        HuggingFaceTokenizer(str(tmp_path / "nowhere.json"))
    with pytest.raises(UserError, match=r"--tokenizer: cannot read .*folder/tokenizer.json"):
        HuggingFaceTokenizer(str(tmp_path / "folder"))
    with pytest.raises(UserError, match=r"--tokenizer: .*bad.json is not a Hugging Face tokenizer.json"):
        HuggingFaceTokenizer(str(tmp_path / "bad.json"))


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"--tokenizer x.json needs the tokenizers library: pip install"):
        HuggingFaceTokenizer("x.json")


def test_documents_are_tokenized_one_by_one_with_end_of_text_between(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["the cat", "the hat\r\n", TEXT]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    documents = list_documents(tuple(str(tmp_path / f"{index}.txt") for index in range(3)))
    with caplog.at_level(logging.INFO):
        source = tokenized(documents, tokenizer, name="--data three")
    end = tokenizer.end_of_text
    assert end is not None
    expected = [*tokenizer.encode(texts[0]), end, *tokenizer.encode(texts[1]), end, *tokenizer.encode(TEXT)]
    assert source.read(0, len(source)).tolist() == expected
    assert source.name.startswith("--data three, tokenized in ")
    assert "Tokenizing 3 files" in caplog.text
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


def test_tokenizer_without_end_of_text_puts_nothing_between(tmp_path: Path, cache: Path) -> None:
    _train(None).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / "a.txt").write_text("the cat")
    documents = list_documents((str(tmp_path / "a.txt"),) * 2)
    source = tokenized(documents, tokenizer, name="--data a.txt")
    assert source.read(0, len(source)).tolist() == tokenizer.encode("the cat") * 2


def test_cache_is_reused_until_a_document_or_the_tokenizer_changes(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat sat")
    tokenized(list_documents((str(path),)), tokenizer, name="--data a.txt")
    [kept] = cache.iterdir()
    made = kept.stat().st_mtime_ns
    # The same file under a relative name is the same corpus.
    monkeypatch.chdir(tmp_path)
    tokenized(list_documents(("a.txt",)), tokenizer, name="--data a.txt")
    assert [(file, file.stat().st_mtime_ns) for file in cache.iterdir()] == [(kept, made)]

    path.write_text("the hat sat")
    os.utime(path, ns=(0, 0))
    source = tokenized(list_documents((str(path),)), tokenizer, name="--data a.txt")
    assert tokenizer.decode(source.read(0, len(source)).tolist()) == "the hat sat"
    _train("</s>").save(str(tmp_path / "tokenizer.json"))
    tokenized(list_documents((str(path),)), HuggingFaceTokenizer(str(tmp_path)), name="--data a.txt")
    assert len(list(cache.iterdir())) == 3


def test_long_document_in_pieces_gives_the_same_tokens_and_reports_progress(
    *,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(token_cache, "_PIECE_CHARACTERS", 100)
    monkeypatch.setattr(token_cache, "_SECONDS_BETWEEN_REPORTS", 0.0)
    (tmp_path / "long.txt").write_text(TEXT * 50)
    with caplog.at_level(logging.INFO):
        source = tokenized(list_documents((str(tmp_path / "long.txt"),)), tokenizer, name="--data long.txt")
    assert source.read(0, len(source)).tolist() == tokenizer.encode(TEXT * 50)
    assert caplog.text.count("Tokenized ") > 10


def test_several_at_once_make_one_whole_file(tokenizer: HuggingFaceTokenizer, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 200)
    documents = list_documents((str(tmp_path / "a.txt"),))
    with ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: tokenized(documents, tokenizer, name="--data a.txt"), range(4)))
    for source in sources:
        np.testing.assert_array_equal(source.read(0, len(source)), tokenizer.encode(TEXT * 200))
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


def test_text_that_is_not_utf8_is_refused_by_name(tokenizer: HuggingFaceTokenizer, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError, match=r"--data: .*latin.txt is not UTF-8 .* --tokenizer"):
        tokenized(list_documents((str(tmp_path / "latin.txt"),)), tokenizer, name="--data latin.txt")
    assert list(cache.iterdir()) == []


def test_cache_folder_that_cannot_be_written_is_named(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"--tokenizer: cannot keep the tokens in .*/file/.*XDG_CACHE_HOME"):
        tokenized(list_documents((str(tmp_path / "a.txt"),)), tokenizer, name="--data a.txt")


def test_cache_is_in_the_home_folder_by_default(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenized(list_documents((str(tmp_path / "a.txt"),)), tokenizer, name="--data a.txt")
    assert len(list((tmp_path / ".cache" / "shiplap").glob("tokens-*.bin"))) == 1
