"""From the logits of the next token to the token."""

import torch
from torch import Tensor

from shiplap.config.generate import SamplingOptions


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
