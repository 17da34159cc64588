"""The loss on text that is not trained on."""

import torch
from torch import nn

from shiplap.data import Batches
from shiplap.dist import GlobalEnv
from shiplap.dist.collectives import all_reduce, size_of
from shiplap.train.precision import computing_in
from shiplap.train.reading import read_together


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
