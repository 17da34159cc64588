"""What a model's folder holds besides the weights, and the prompt, checked against each other."""

import sys
from dataclasses import dataclass
from pathlib import Path

from shiplap.checkpoint import check_huggingface, newest_checkpoint, read_adapters
from shiplap.config import TransformerConfig, UserError
from shiplap.config.json_fields import read_json_object
from shiplap.data import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, open_tokenizer
from shiplap.families.config_json import read_config
from shiplap.generation.options import GenerateConfig, TextOptions


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to write with, but for its weights, and what to go on with.

    Attributes:
        directory: the Hugging Face directory.
        family: of the model, such as `gpt2`.
        model: the model's sizes.
        tokenizer: reads the prompt, and turns tokens into text.
        stop_tokens: end a text.
        prompt: token ids, at least one.
    """

    directory: str
    family: str
    model: TransformerConfig
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    prompt: list[int]


def open_source(directory: str, config: GenerateConfig, prompt: str) -> Source:
    """Open what is needed besides the weights. Communicates nothing.

    Args:
        directory: a Hugging Face directory, or a folder of a training run's checkpoints `step-N`.
        config: what was asked for.
        prompt: the text to go on with.

    Raises:
        UserError: a file is missing or damaged, the TP size does not divide the model, there is no tokenizer, or the
            prompt is empty or too long for the model; or adapters are for another model.
    """
    directory = newest_checkpoint(directory)
    family, model = read_config(directory, None)
    model.check_divisible_by(config.machine.tensor_parallel_size)
    check_huggingface(directory, family=family, config=model)
    if config.text.lora is not None:
        read_adapters(config.text.lora, family=family, config=model)
    tokenizer = _open_tokenizer(directory, config.text, vocab_size=model.vocab_size)
    return Source(
        directory=directory,
        family=family,
        model=model,
        tokenizer=tokenizer,
        stop_tokens=frozenset(_end_of_text(directory, tokenizer) if config.text.stop else ()),
        prompt=_tokens_of(prompt, tokenizer, max_sequence_length=model.max_sequence_length),
    )


def read_prompt(options: TextOptions) -> str:
    """The text to go on with, from the command line, a file or the standard input.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        if options.prompt is not None:
            # What the shell passes on and is not UTF-8 fails here, and not later in the tokenizer.
            return options.prompt.encode().decode()
        if options.prompt_file == "-":
            return sys.stdin.buffer.read().decode()
        return Path(str(options.prompt_file)).read_bytes().decode()
    except OSError as error:
        raise UserError(f"--prompt-file {options.prompt_file}: {error.strerror}.") from None
    except UnicodeError as error:
        flag = "--prompt" if options.prompt is not None else f"--prompt-file {options.prompt_file}"
        raise UserError(f"{flag} is not UTF-8 text: {error}.") from None


def _open_tokenizer(directory: str, options: TextOptions, *, vocab_size: int) -> Tokenizer:
    own = Path(directory) / "tokenizer.json"
    tokenizer: Tokenizer
    if options.tokenizer is not None:
        tokenizer = open_tokenizer(options.tokenizer)
    elif own.exists():
        tokenizer = HuggingFaceTokenizer(str(own))
    else:
        tokenizer = ByteTokenizer()
        if vocab_size != tokenizer.vocab_size:
            raise UserError(
                f"{own} does not exist, and with a vocabulary of {vocab_size} tokens the model does not read bytes "
                f"(that is {tokenizer.vocab_size}). Give its tokenizer.json with --tokenizer, or say --tokenizer bytes "
                "if it was trained on bytes all the same."
            )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"--tokenizer {options.tokenizer or own} takes a vocabulary of {tokenizer.vocab_size} tokens, but the "
            f"model's is {vocab_size}. Give the tokenizer that the model was trained with."
        )
    return tokenizer


def _tokens_of(prompt: str, tokenizer: Tokenizer, *, max_sequence_length: int) -> list[int]:
    tokens = tokenizer.encode_prompt(prompt)
    if not tokens and tokenizer.end_of_text is not None:
        # What stands between documents in training is what a document begins after.
        tokens = [tokenizer.end_of_text]
    if not tokens:
        raise UserError(
            "The prompt is empty, and this tokenizer has no token that a text begins with. Give a --prompt."
        )
    if len(tokens) > max_sequence_length:
        raise UserError(
            f"The prompt has {len(tokens)} tokens, but the model takes {max_sequence_length} at most. Shorten it."
        )
    return tokens


def _end_of_text(directory: str, tokenizer: Tokenizer) -> list[int]:
    """As in `transformers`, what generation_config.json says comes first."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        given = read_json_object(path).get("eos_token_id") if path.exists() else None
        if given is not None:
            tokens = given if isinstance(given, list) else [given]
            if not all(type(token) is int for token in tokens):
                raise UserError(f"{path}: eos_token_id must be a token's id or a list of them, got {given!r}.")
            return tokens
    return [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
