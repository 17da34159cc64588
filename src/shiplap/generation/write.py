"""One rank's part of writing texts and showing them."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shiplap.checkpoint import load_adapters, load_huggingface
from shiplap.config import UserError
from shiplap.config.option import flags_of
from shiplap.data import Tokenizer
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together
from shiplap.dist.launch import agreed_env
from shiplap.generation.decode import generate
from shiplap.generation.options import GenerateConfig
from shiplap.generation.source import Source, open_source
from shiplap.lora import merge, remove_adapters

_UNDECODABLE = "\ufffd"
Steps = Iterator[list[int | None]]


def write(directory: str, config: GenerateConfig, prompt: str) -> bool:
    """Write texts to the standard output, as one rank of the job in whose `joined_world` this is called, or alone.

    The first rank writes: prompt and continuation. Notes and the speed go to the standard error.

    Args:
        directory: a Hugging Face directory, or the folder of a training run's checkpoints.
        config: what was asked for.
        prompt: the text to go on with.

    Returns:
        False on the first rank, if whoever read the standard output left before the end. All ranks have stopped then.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    machine = config.machine
    settings = {"the model's folder": directory, "the prompt": prompt, **flags_of(config)}
    with agreed_env(machine.parallel, device=machine.device, settings=settings) as env:
        with fail_together():
            if env.layout.data_size > 1:
                raise UserError(
                    f"--tensor-parallel {machine.tensor_parallel_size} needs as many ranks, but the launcher started "
                    f"{env.layout.world_size}. generate has no use for more."
                )
            source = open_source(directory, config, prompt)
            model = _load(source, config, env)
        output = _Output()
        steps = generate(
            model,
            torch.tensor([source.prompt]),
            num_tokens=config.text.num_tokens,
            max_sequence_length=source.model.max_sequence_length,
            sampling=config.sampling,
            num_samples=config.text.num_samples,
            stop_tokens=source.stop_tokens,
            wanted=lambda: output.is_read,
            group=env.group("tp"),
        )
        if env.rank == 0:
            for note in _notes(directory, source, config):
                _say(note)
            _show(steps, source, config, prompt=prompt, output=output)
        else:
            deque(steps, maxlen=0)  # the other ranks compute, and say nothing
    return output.is_read


class TextStream:
    """Turns tokens into text piece by piece: the pieces put together are the text of all tokens.

    A token may end in the middle of a character, and what a token reads as may depend on its neighbours. So tokens are
    decoded together with some before them, and undecodable text at the end is held back until more tokens decide it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """Nothing said yet.

        Args:
            tokenizer: of the tokens.
            before: tokens that come before the text, such as the prompt; not part of it.
        """
        self._tokenizer = tokenizer
        # The tokens that are still decoded. Some of them are old: the text of those is `_shown` characters long.
        self._tokens = list(before)
        self._num_old = len(self._tokens)
        self._shown = len(tokenizer.decode(self._tokens))

    def push(self, token: int) -> str:
        """The text that one more token makes certain; often of this token, sometimes none, or that of several."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        certain = text.rstrip(_UNDECODABLE)
        new = certain[self._shown :]
        if new and certain == text:
            # The old tokens have served; what was new until now is enough to read the next ones by.
            del self._tokens[: self._num_old]
            self._num_old = len(self._tokens)
            self._shown = len(self._tokenizer.decode(self._tokens))
        else:
            self._shown += len(new)
        return new

    def end(self) -> str:
        """What was held back."""
        return self._tokenizer.decode(self._tokens)[self._shown :]


class _Output:
    """The standard output.

    Attributes:
        is_read: whether there is still somebody who reads it.
    """

    def __init__(self) -> None:
        self.is_read = True

    def write(self, text: str) -> None:
        """Write it at once; nothing, once nobody reads."""
        try:
            if self.is_read:
                print(text, end="", flush=True)
        except BrokenPipeError:
            self.is_read = False


def _load(source: Source, config: GenerateConfig, env: GlobalEnv) -> nn.Module:
    with _new_parameters_in(getattr(torch, config.machine.dtype)):
        loaded = load_huggingface(source.directory, parallel=config.machine.parallel, group=env.group("tp"))
        model = loaded.model
        if config.text.lora is not None:
            load_adapters(model, config.text.lora, family=loaded.family, config=loaded.config, group=env.group("tp"))
            merge(model)
            remove_adapters(model)
    return model.to(env.device).eval()


@contextmanager
def _new_parameters_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _say(note: str) -> None:
    print(note, file=sys.stderr, flush=True)


def _notes(directory: str, source: Source, config: GenerateConfig) -> Iterator[str]:
    if source.directory != directory:
        yield f"{directory} holds checkpoints of a run; this is the newest, {source.directory}."
    context = source.model.max_sequence_length
    if len(source.prompt) + config.text.num_tokens - 1 > context:
        yield f"The model's context is {context} tokens. Whenever it is full, writing goes on from its later half."


def _show(steps: Steps, source: Source, config: GenerateConfig, *, prompt: str, output: _Output) -> None:
    """Print texts, a single one as it comes; then the speed."""
    num_texts = config.text.num_samples
    streams = [TextStream(source.tokenizer, source.prompt) for _ in range(num_texts)]
    texts = [[prompt] for _ in range(num_texts)]

    def print_single() -> None:
        if num_texts == 1:
            output.write("".join(texts[0]))
            texts[0].clear()

    print_single()
    started = time.perf_counter()
    first, num_later = None, 0
    for step in steps:
        if first is None:
            first = time.perf_counter()
        else:
            num_later += sum(token is not None for token in step)
        for token, stream, text in zip(step, streams, texts, strict=True):
            text.append("" if token is None else stream.push(token))
        print_single()
    ended = time.perf_counter()
    for number, (stream, text) in enumerate(zip(streams, texts, strict=True)):
        headline = "" if num_texts == 1 else f"--- sample {number + 1}/{num_texts} ---\n"
        output.write(f"{headline}{''.join(text)}{stream.end()}\n")
    # The first tokens come out of reading the prompt.
    first = first or ended
    speed = _speed("prompt: {} tokens", len(source.prompt), first - started)
    if num_later:
        speed += "; then " + _speed("{} tokens", num_later, ended - first)
    if output.is_read:
        _say(speed)


def _speed(what: str, num_tokens: int, seconds: float) -> str:
    return f"{what.format(num_tokens)} in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)"
