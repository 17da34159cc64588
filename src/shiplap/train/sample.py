"""What the model writes by itself: the simplest way, without a cache of keys and values."""

import torch
from torch import nn

from shiplap.data import Tokenizer
from shiplap.train.precision import computing_in

_TEMPERATURE = 0.8
_TOP_K = 40


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


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: list[int],
    *,
    num_tokens: int,
    max_sequence_length: int,
    seed: int,
    dtype: str,
    device: torch.device,
) -> list[int]:
    """Draw tokens one by one, each from the model's 40 likeliest at temperature 0.8.

    All TP ranks of a replica must call this alike: they have the same logits, and draw the same tokens.

    Args:
        model: not wrapped.
        prompt: the first tokens, at least one; not part of what is returned.
        num_tokens: how many to draw.
        max_sequence_length: the model sees the last so many tokens at most.
        seed: of the draws.
        dtype: `float32` or `bfloat16`.
        device: of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-max_sequence_length:]], device=device)
        with computing_in(dtype, device):
            logits = model(context)[0, -1]
        likeliest = logits.float().cpu().topk(min(_TOP_K, logits.shape[0]))
        chosen = torch.multinomial((likeliest.values / _TEMPERATURE).softmax(-1), 1, generator=generator)
        tokens.append(int(likeliest.indices[chosen]))
    model.train()
    return tokens[len(prompt) :]
