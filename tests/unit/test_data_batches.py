"""Which tokens each micro-batch holds, and the one way in."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shiplap.config import DataOptions, UserError
from shiplap.data import Batches, ByteTokenizer, Data, TokenFile, open_data, write_token_file

S = 4


@pytest.fixture
def source(tmp_path: Path) -> TokenFile:
    """Tokens 0, 1, 2, …, so that a token tells its own position: 25 windows of training, 6 of validation."""
    write_token_file(tmp_path / "tokens.bin", [np.arange(126)], vocab_size=126)
    return TokenFile(tmp_path / "tokens.bin")


def _batches(
    source: TokenFile,
    *,
    rank: int = 0,
    size: int = 1,
    batch_size: int = 2,
    total: int | None = None,
    fraction: float = 0.2,
    seed: int = 7,
    validation: bool = True,
    vocab_size: int = 126,
    sequence_length: int = S,
) -> Batches:
    options = DataOptions(
        batch_size=batch_size,
        sequence_length=sequence_length,
        total_batch_size=None if total is None else total * sequence_length,
        validation_fraction=fraction,
    )
    return Batches(
        source,
        options=options,
        vocab_size=vocab_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        seed=seed,
        validation=validation,
    )


def _starts(tokens: torch.Tensor) -> list[int]:
    """Where in the source each sequence begins."""
    return [int(start) for start in tokens[:, 0]]


def _epoch(batches: Batches, epoch: int) -> list[int]:
    return [_starts(batches.train_batch(step, 0)[0])[0] for step in range(epoch * 25, (epoch + 1) * 25)]


def test_targets_are_the_tokens_one_place_further(source: TokenFile) -> None:
    for tokens, targets in (_batches(source).train_batch(3, 0), _batches(source).validation_batch(1)):
        assert tokens.shape == targets.shape == (2, S)
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.is_contiguous()
        assert targets.is_contiguous()
        expected = tokens[:, :1] + torch.arange(S + 1)
        torch.testing.assert_close(torch.cat([tokens, targets[:, -1:]], dim=1), expected)
        torch.testing.assert_close(targets, expected[:, 1:])


def test_each_epoch_visits_every_training_window_once_in_its_own_order(source: TokenFile) -> None:
    batches = _batches(source, batch_size=1)
    every_window = [S * window for window in range(25)]
    first, second = _epoch(batches, 0), _epoch(batches, 1)
    assert sorted(first) == sorted(second) == every_window
    assert len({tuple(order) for order in (first, second, every_window)}) == 3
    # Back to an earlier epoch, as after a resume, and with a new object.
    assert _epoch(batches, 0) == _epoch(_batches(source, batch_size=1), 0) == first
    assert _epoch(_batches(source, batch_size=1, seed=8), 0) != first


def test_order_of_an_epoch_is_pinned(source: TokenFile) -> None:
    # A changed order, here or in NumPy, would silently change every resumed run.
    assert _epoch(_batches(source, batch_size=1), 0)[:6] == [68, 16, 76, 12, 60, 48]


def test_batch_may_span_two_epochs(source: TokenFile) -> None:
    one_by_one = _batches(source, batch_size=1)
    expected = (_epoch(one_by_one, 0) + _epoch(one_by_one, 1))[20:30]
    assert _starts(_batches(source, batch_size=10).train_batch(2, 0)[0]) == expected


@pytest.mark.parametrize(("size", "batch_size"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_samples_of_a_step_depend_neither_on_ranks_nor_on_micro_batches(
    source: TokenFile, size: int, batch_size: int
) -> None:
    whole = _batches(source, batch_size=8)
    ranks = [_batches(source, rank=rank, size=size, batch_size=batch_size, total=8) for rank in range(size)]
    for step in range(5):
        divided = [
            start
            for micro_batch in range(8 // (size * batch_size))
            for rank in ranks
            for start in _starts(rank.train_batch(step, micro_batch)[0])
        ]
        assert divided == _starts(whole.train_batch(step, 0)[0])


def test_validation_is_the_last_share_in_order_and_starts_over(source: TokenFile) -> None:
    ranks = [_batches(source, rank=rank, size=2) for rank in range(2)]
    starts = [_starts(rank.validation_batch(index)[0]) for index in range(2) for rank in ranks]
    assert starts == [[101, 105], [109, 113], [117, 121], [101, 105]]


def test_training_never_sees_the_validation_split_and_does_not_change_without_it(source: TokenFile) -> None:
    with_validation, without = _batches(source), _batches(source, validation=False)
    for step in range(30):
        tokens, targets = with_validation.train_batch(step, 0)
        assert int(targets.max()) < 101
        assert torch.equal(tokens, without.train_batch(step, 0)[0])


def test_window_whose_last_target_lies_in_the_validation_split_does_not_train(source: TokenFile) -> None:
    # 100 training tokens: 25 full inputs, but the last one has no target of its own.
    batches = _batches(source, fraction=0.207, batch_size=24)
    assert sorted(_starts(batches.train_batch(0, 0)[0])) == [S * window for window in range(24)]


def test_without_validation_fraction_all_tokens_train(source: TokenFile) -> None:
    batches = _batches(source, fraction=0.0, validation=False, batch_size=31)
    assert sorted(_starts(batches.train_batch(0, 0)[0])) == list(range(0, 124, S))


def test_validation_without_a_fraction_is_refused(source: TokenFile) -> None:
    with pytest.raises(UserError, match="--validation-fraction 0 leaves no tokens"):
        _batches(source, fraction=0.0)


def test_split_of_exactly_one_window_is_enough(source: TokenFile) -> None:
    batches = _batches(source, sequence_length=24, batch_size=1)
    assert _starts(batches.validation_batch(5)[0]) == [101]


def test_split_shorter_than_one_sequence_is_refused_with_both_numbers(source: TokenFile) -> None:
    message = r"--input-bin .*tokens.bin: the {} split has {} of its 126 tokens, .*--sequence-length \+ 1 = {}"
    with pytest.raises(UserError, match=message.format("validation", 25, 26)):
        _batches(source, sequence_length=25)
    _batches(source, sequence_length=25, validation=False)
    with pytest.raises(UserError, match=message.format("training", 101, 102)):
        _batches(source, sequence_length=101, validation=False)


def test_token_outside_the_vocabulary_is_refused_where_it_is_read(source: TokenFile) -> None:
    batches = _batches(source, vocab_size=125, batch_size=1)
    batches.validation_batch(4)
    with pytest.raises(UserError, match=r"--input-bin .*tokens.bin: token 125 at position 125 .* vocabulary of 125"):
        batches.validation_batch(5)


def test_indivisible_total_batch_is_refused(source: TokenFile) -> None:
    with pytest.raises(UserError, match="--total-batch-size 12"):
        _batches(source, total=3)


def _open(options: DataOptions, vocab_size: int = 257) -> Data:
    return open_data(
        options, vocab_size=vocab_size, data_parallel_rank=0, data_parallel_size=1, seed=0, validation=True
    )


def test_the_default_corpus_opens_and_decodes_to_python() -> None:
    data = _open(DataOptions())
    tokens, _ = data.batches.train_batch(0, 0)
    assert tokens.shape == (8, 128)
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert data.source.name == "--data stdlib"
    text = data.tokenizer.decode(data.source.read(0, 20_000).tolist())
    assert "import " in text
    assert "def " in text


def test_text_is_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("ijk")
    options = DataOptions(
        data=(str(tmp_path / "a.txt"), str(tmp_path / "folder")), sequence_length=2, validation_fraction=0.3
    )
    data = _open(options)
    assert data.source.read(0, len(data.source)).tolist() == [*b"abcdefgh", 256, *b"ijk"]
    assert data.source.name == f"--data {tmp_path / 'a.txt'} and 1 more"


def test_text_is_tokenized_with_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _save_word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("one two two " * 20)
    options = DataOptions(
        data=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path), sequence_length=S, validation_fraction=0.2
    )
    data = _open(options, vocab_size=3)
    assert data.source.read(0, 6).tolist() == [1, 2, 2, 1, 2, 2]
    assert data.tokenizer is not None
    assert data.tokenizer.decode([1, 2]) == "one two"
    with pytest.raises(UserError, match=r"--tokenizer .* vocabulary of 3 tokens, but the model's is 2"):
        _open(options, vocab_size=2)


def test_tokenizer_too_large_is_refused_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _save_word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="--tokenizer"):
        _open(DataOptions(tokenizer=str(tmp_path)), vocab_size=2)
    assert not (tmp_path / "cache").exists()


def test_bytes_need_257_tokens() -> None:
    with pytest.raises(UserError, match=r"byte by byte takes a vocabulary of 257 .* model's is 256"):
        _open(DataOptions(), vocab_size=256)


def test_token_file_has_a_tokenizer_only_where_one_is_named(source: TokenFile, tmp_path: Path) -> None:
    _save_word_tokenizer(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokens.bin")
    data = _open(DataOptions(input_bin=path, sequence_length=S))
    assert data.tokenizer is None
    assert len(data.source) == len(source)
    data = _open(DataOptions(input_bin=path, sequence_length=S, tokenizer=str(tmp_path)))
    assert data.tokenizer is not None
    assert data.tokenizer.decode([2]) == "two"


def test_import_loads_neither_the_tokenizers_library_nor_sets_up_logging() -> None:
    code = "import sys, logging, shiplap.data; assert 'tokenizers' not in sys.modules; assert not logging.root.handlers"
    subprocess.run([sys.executable, "-c", code], check=True)


def _save_word_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(path))
