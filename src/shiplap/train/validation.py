"""What the model is worth between steps: its loss on text that is not trained on, and a sample of what it writes."""

import torch
from torch import nn

from shiplap.data import Batches, Tokenizer
from shiplap.dist import GlobalEnv
from shiplap.dist.collectives import Group, all_reduce, size_of
from shiplap.generation import generate
from shiplap.generation.options import SamplingOptions
from shiplap.train.step import computing_in, read_together


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Batches, *, num_batches: int, dtype: str, env: GlobalEnv) -> float:
    """The mean loss over the first validation batches, the same ones every time, and over the data-parallel ranks.

    Args:
        model: not wrapped.
        batches: opened with validation.
        num_batches: micro-batches per data-parallel rank.
        dtype: `float32` or `bfloat16`.
        env: device and groups; all ranks must call this.

    Raises:
        AgreedError: on every rank, if one cannot read its data.
    """
    group = env.group("dp")
    data = read_together(lambda: [batches.validation_batch(index) for index in range(num_batches)], group)
    total = torch.zeros((), device=env.device)
    model.eval()
    for tokens, targets in data:
        with computing_in(dtype, env.device):
            total += model(tokens.to(env.device), targets.to(env.device))
    model.train()
    return float(all_reduce(total, group).wait().item() / num_batches / size_of(group))


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
