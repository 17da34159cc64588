"""What the model writes by itself between steps."""

import torch
from torch import nn

from shiplap.data import Tokenizer
from shiplap.dist.collectives import Group
from shiplap.generation import generate
from shiplap.generation.options import SamplingOptions


def prompt_of(tokenizer: Tokenizer | None) -> list[int]:
    """How a sample begins: with a line break, which a model learns to go on from long before the end of a text.

    Where a tokenizer has none, with the end of a text; and with token 0 where there is neither.
    """
    line_break = [] if tokenizer is None else tokenizer.encode("\n")
    if line_break or tokenizer is None or tokenizer.end_of_text is None:
        return line_break or [0]
    return [tokenizer.end_of_text]


def text_of(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    """Tokens for people to read; without a tokenizer, their numbers."""
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def sample(
    model: nn.Module, prompt: list[int], *, num_tokens: int, max_sequence_length: int, seed: int, group: Group
) -> list[int]:
    """Draw tokens one by one, as `shiplap generate` does when it is told no more than a seed.

    In float32, also where training computes in bfloat16 under autocast: that would cast every parameter anew for every
    token, which takes longer than to multiply by it.

    Args:
        model: not wrapped.
        prompt: the first tokens, at least one; not part of what is returned.
        num_tokens: how many to draw; the end of a text does not end the sample.
        max_sequence_length: the model's.
        seed: of the draws.
        group: the TP ranks; all of them must call this alike.
    """
    model.eval()
    steps = generate(
        model,
        torch.tensor([prompt]),
        num_tokens=num_tokens,
        max_sequence_length=max_sequence_length,
        sampling=SamplingOptions(seed=seed),
        group=group,
    )
    tokens = [token for [token] in steps if token is not None]
    model.train()
    return tokens
