"""Layers as models use them: shared weights, residuals, chains, accumulation over micro-batches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from shiplap.dist.collectives import Group, all_gather, rank_in, size_of

SEQUENCE, BATCH, HIDDEN, FFN = 16, 2, 24, 40


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


class Block(torch.nn.Module):
    """`x + fc2(relu(fc1(x)))`, the two layers used as often as asked."""

    def __init__(self, config: ModelParallelConfig, group: Group) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(HIDDEN, FFN, config=config, group=group, init=lambda w: w.copy_(W1))
        self.fc2 = RowParallelLinear(FFN, HIDDEN, config=config, group=group, init=lambda w: w.copy_(W2))
        with torch.no_grad():
            self.fc1.bias.copy_(B1.chunk(size_of(group))[rank_in(group)])  # type: ignore[union-attr]
            self.fc2.bias.copy_(B2)  # type: ignore[union-attr]

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = x + self.fc2(F.relu(self.fc1(x)))
        return x


W1, B1, W2, B2 = draw(FFN, HIDDEN, seed=1), draw(FFN, seed=2), draw(HIDDEN, FFN, seed=3), draw(HIDDEN, seed=4)


def plain(x: Tensor, weights: list[Tensor], times: int) -> Tensor:
    w1, b1, w2, b2 = weights
    for _ in range(times):
        x = x + F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)
    return x


def whole_gradients(block: Block, group: Group) -> list[Tensor]:
    def gather(grad: Tensor | None, dim: int) -> Tensor:
        assert grad is not None
        return torch.cat(tuple(all_gather(grad[None], group).wait()), dim=dim)

    assert block.fc1.bias is not None
    assert block.fc2.bias is not None
    return [
        gather(block.fc1.weight.grad, 0),
        gather(block.fc1.bias.grad, 0),
        gather(block.fc2.weight.grad, 1),
        block.fc2.bias.grad,  # type: ignore[list-item]
    ]


def check(config: ModelParallelConfig, group: Group, *, times: int, micro_batches: int) -> list[str]:
    """Gradients of a chain with shared weights, accumulated over micro-batches, against float64."""
    block = Block(config, group)
    weights = [value.double().requires_grad_() for value in (W1, B1, W2, B2)]
    failures = []
    for micro_batch in range(micro_batches):
        full = draw(SEQUENCE, BATCH, HIDDEN, seed=10 + micro_batch)
        expected_x = full.double().requires_grad_()
        expected = plain(expected_x, weights, times)
        expected.square().mean().backward()

        shard = full.chunk(size_of(group))[rank_in(group)] if config.sequence_parallel else full
        x = shard.clone().requires_grad_()
        y = block(x, times)
        # The same loss: each rank's tokens are its share of the mean.
        (y.square().sum() / full.numel()).backward()
        assert x.grad is not None
        assert expected_x.grad is not None
        reference = expected_x.grad
        if config.sequence_parallel:
            reference = reference.chunk(size_of(group))[rank_in(group)]
        if not torch.allclose(x.grad.double(), reference, rtol=1e-4, atol=1e-7):
            failures.append(f"dx of micro-batch {micro_batch}")
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    for name, got, weight in zip(names, whole_gradients(block, group), weights, strict=True):
        assert weight.grad is not None
        error = float((got.double() - weight.grad).norm() / weight.grad.norm())
        if not error < 5e-6:
            failures.append(f"{name} is off by {error:.1e}")
    return failures
