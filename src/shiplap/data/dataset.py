"""From the options to the batches: the one way in for the trainer."""

from dataclasses import dataclass
from pathlib import Path

from shiplap.config import DataOptions, UserError
from shiplap.data.batches import Batches
from shiplap.data.byte_source import ByteSource
from shiplap.data.documents import list_documents
from shiplap.data.source import TokenSource
from shiplap.data.token_cache import tokenized
from shiplap.data.token_file import TokenFile
from shiplap.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class Data:
    """An opened corpus.

    Attributes:
        source: the tokens.
        tokenizer: for prompts and samples; None for `--input-bin` without `--tokenizer`.
        batches: what to train and validate on.
    """

    source: TokenSource
    tokenizer: Tokenizer | None
    batches: Batches


def open_data(
    options: DataOptions,
    *,
    vocab_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    seed: int,
    validation: bool,
) -> Data:
    """Open what `--data` or `--input-bin` names, and check all that can be checked without reading it whole.

    Takes well under a second, except that `--data` with `--tokenizer` tokenizes the text the first time.

    Args:
        options: what to train on.
        vocab_size: the model's, in tokens.
        data_parallel_rank: this rank's place among the data-parallel ranks.
        data_parallel_size: number of data-parallel ranks.
        seed: of the order of the training data, at least 0.
        validation: whether validation batches will be asked for.

    Raises:
        UserError: a file is missing, unreadable or of the wrong kind; the text is too short; or the
            tokenizer's vocabulary is larger than the model's. The message names the flag and the file.
    """
    tokenizer = _open_tokenizer(options)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        what = f"--tokenizer {options.tokenizer}" if options.tokenizer else "reading --data byte by byte"
        raise UserError(
            f"{what} takes a vocabulary of {tokenizer.vocab_size} tokens, but the model's is {vocab_size}. "
            f"Raise --vocab-size to {tokenizer.vocab_size} or more; a model that is loaded needs its own tokenizer."
        )
    source = _open_source(options, tokenizer)
    batches = Batches(
        source,
        options=options,
        vocab_size=vocab_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        seed=seed,
        validation=validation,
    )
    return Data(source=source, tokenizer=tokenizer, batches=batches)


def _open_tokenizer(options: DataOptions) -> ByteTokenizer | HuggingFaceTokenizer | None:
    if options.tokenizer is not None:
        return open_tokenizer(options.tokenizer)
    return ByteTokenizer() if options.input_bin is None else None


def _open_source(options: DataOptions, tokenizer: ByteTokenizer | HuggingFaceTokenizer | None) -> TokenSource:
    if options.input_bin is not None:
        return TokenFile(Path(options.input_bin))
    documents = list_documents(options.data)
    first, *others = options.data
    name = f"--data {first}" + (f" and {len(others)} more" if others else "")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenized(documents, tokenizer, name=name)
    return ByteSource(documents, name=name)
