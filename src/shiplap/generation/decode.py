"""The loop that writes: one pass over the prompt, then one token at a time, each drawn from the model's logits."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from shiplap.dist.collectives import Group, broadcast, rank_in
from shiplap.generation.options import SamplingOptions
from shiplap.layers.cache import KeyValueCache

_NO_MORE = -1
"""Instead of a token's id."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor,
    *,
    num_tokens: int,
    max_sequence_length: int,
    sampling: SamplingOptions,
    num_samples: int | None = None,
    stop_tokens: Collection[int] = (),
    wanted: Callable[[], bool] = lambda: True,
    group: Group = None,
) -> Iterator[list[int | None]]:
    """Go on with B texts at once, token by token as they are drawn.

    The model computes each token once and keeps its keys and values. When its context is full, writing goes on from
    the later half of it, which is computed anew: the tokens before that no longer matter.

    Args:
        model: a `DecoderModel` in eval mode, of any family and topology, also under autocast. All ranks of `group`
            must call this alike, and take all steps.
        prompts: token ids `[B, S]` with S ≥ 1, or `[1, S]` for `num_samples` texts that begin alike.
        num_tokens: most tokens to draw for each text.
        max_sequence_length: the model's, at least S.
        sampling: how tokens are drawn; text i has seed `sampling.seed + i`.
        num_samples: B, by default the number of prompts.
        stop_tokens: tokens that end a text, and are not part of it.
        wanted: asked before each token, on the first rank of `group`: whether there should be more. So the ranks can
            be made to stop together, whatever happened to that one.
        group: the TP ranks.

    Yields:
        The next token of each text, or None for one that has ended; until all have.

    Raises:
        ValueError: the prompt is empty or longer than `max_sequence_length`, or `num_samples` does not fit `prompts`.
    """
    batch_size, length = num_samples or prompts.shape[0], prompts.shape[1]
    if prompts.shape[0] not in (1, batch_size):
        raise ValueError(f"{prompts.shape[0]} prompts for {batch_size} samples; give one prompt, or one for each.")
    if not 1 <= length <= max_sequence_length:
        raise ValueError(f"A prompt of {length} tokens, but the model takes 1 … {max_sequence_length}.")
    assert not model.training, "dropout would be part of the text"
    device = next(model.parameters()).device
    tokens = torch.empty(batch_size, length + num_tokens, dtype=torch.long, device=device)
    tokens[:, :length] = prompts
    # The last token is drawn but never computed.
    cache = KeyValueCache(min(max_sequence_length, length + num_tokens - 1), batch_size)
    choose = Chooser(sampling, batch_size)
    new = prompts.to(device)
    ended = [False] * batch_size
    for position in range(length, length + num_tokens):
        if cache.length + new.shape[1] > max_sequence_length:
            cache.clear()
            new = tokens[:, position - max(max_sequence_length // 2, 1) : position]
        logits = model(new, cache=cache, last_only=True)[:, -1].expand(batch_size, -1)
        chosen = torch.full((batch_size,), _NO_MORE, device=device)
        if rank_in(group) == 0 and wanted():
            chosen.copy_(choose(logits))
        # The ranks' logits are the same bits: each slice is computed by one rank, and gathered. But drawing from them
        # is arithmetic again, which hosts with other processors round differently, and ranks that disagreed on a token
        # would go wrong without a word. So one rank draws. This message has 8 B bytes; each block of the model sends
        # two, and larger ones.
        new = broadcast(chosen, 0, group).wait()[:, None]
        tokens[:, position] = new[:, 0]
        drawn = new[:, 0].tolist()
        if drawn[0] == _NO_MORE:
            return
        ended = [before or token in stop_tokens for before, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        yield [None if end else token for end, token in zip(ended, drawn, strict=True)]


def probabilities(logits_BV: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """Which tokens may be drawn: temperature, then the `top_k` likeliest, then the nucleus (Holtzman et al. 2019).

    Args:
        logits_BV: `[B, V]`.
        options: temperature above 0.

    Returns:
        Probabilities up to a factor, and whose they are: both `[B, C]` with C ≤ V, on the CPU, the first in float64.
        Of tokens as likely as the last of the `top_k`, any may be among these.
    """
    logits = logits_BV.float()
    # The largest is 0 then: however small the temperature, nothing overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / options.temperature
    if options.top_k:
        logits, tokens = logits.topk(min(options.top_k, logits.shape[-1]))
    elif options.top_p < 1.0:
        logits, tokens = logits.sort(descending=True)
    else:
        tokens = torch.arange(logits.shape[-1]).expand(logits.shape)
    weights = logits.cpu().double().softmax(-1)
    if options.top_p < 1.0:
        likelier = weights.cumsum(-1) - weights
        weights = weights.masked_fill(likelier >= options.top_p, 0.0)
    return weights, tokens.cpu()


class Chooser:
    """Draws the next token of each of several texts, every text with random numbers of its own.

    So a text does not depend on how many others are written beside it.
    """

    def __init__(self, options: SamplingOptions, num_texts: int) -> None:
        """Text i draws from a generator with seed `options.seed + i`."""
        self._options = options
        self._generators = [torch.Generator().manual_seed(options.seed + i) for i in range(num_texts)]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """`[B, V]` to token ids `[B]`, on the CPU; at temperature 0 the first of the likeliest."""
        if self._options.temperature == 0.0:
            return logits_BV.argmax(-1).cpu()
        weights, tokens = probabilities(logits_BV, self._options)
        reached = weights.cumsum(-1)
        draws = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in self._generators]
        # In (0, 1], so that a token of probability 0 is never the first to reach it.
        threshold = (1.0 - torch.stack(draws)) * reached[:, -1:]
        return tokens.gather(-1, torch.searchsorted(reached, threshold)).squeeze(-1)
