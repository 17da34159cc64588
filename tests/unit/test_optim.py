"""The schedule, who gets weight decay, and clipping on one rank; clipping over TP ranks is in `test_train`."""

import math

import pytest
import torch
from torch import nn

from shiplap.config import ModelParallelConfig, OptimizerOptions, TransformerConfig
from shiplap.models.decoder import build_model
from shiplap.optim import build_adamw, clip_gradients, learning_rate_at, set_learning_rate

OPTIONS = OptimizerOptions(num_iteration=110, learning_rate=1.0, warmup_iteration=9, min_learning_rate=0.1)


def small_gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = TransformerConfig(
        vocab_size=31,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=32,
        max_sequence_length=8,
    )
    return build_model("gpt2", sizes, parallel=ModelParallelConfig(), group=None, seed=0)


def test_the_learning_rate_rises_in_a_line_from_0_to_the_peak() -> None:
    rates = [learning_rate_at(step, OPTIONS) for step in range(10)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_the_learning_rate_falls_along_half_a_cosine_to_the_minimum() -> None:
    rates = [learning_rate_at(step, OPTIONS) for step in range(9, 110)]
    assert rates == sorted(rates, reverse=True)
    middle = 9 + 101 / 2
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (59 - 9) / 101))
    assert learning_rate_at(59, OPTIONS) == pytest.approx(expected)
    assert learning_rate_at(int(middle), OPTIONS) > 0.55 > learning_rate_at(int(middle) + 1, OPTIONS)
    assert 0.1 < rates[-1] < 0.101


def test_a_run_without_warm_up_starts_at_the_peak() -> None:
    assert learning_rate_at(0, OptimizerOptions(warmup_iteration=0, learning_rate=0.5)) == 0.5


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    options = OptimizerOptions(num_iteration=5, warmup_iteration=9, learning_rate=1.0)
    assert learning_rate_at(4, options) == pytest.approx(0.5)


def test_only_matrices_have_weight_decay() -> None:
    model = small_gpt2()
    optimizer = build_adamw(model, OptimizerOptions(weight_decay=0.3), fused=False)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay.pop(id(parameter)) == (0.0 if "bias" in name or "norm" in name else 0.3), name
    assert not decay


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 3)
    model.weight.requires_grad = False
    optimizer = build_adamw(model, OptimizerOptions(), fused=False)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]


def test_the_learning_rate_is_set_for_all_parameters() -> None:
    optimizer = build_adamw(small_gpt2(), OptimizerOptions(), fused=False)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_clipping_counts_tied_weights_once() -> None:
    model = small_gpt2()
    tokens = torch.randint(31, (2, 8))
    model(tokens, tokens).backward()
    gradients = {id(p): p.grad.clone() for p in model.parameters() if p.grad is not None}
    expected = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()

    norm = clip_gradients(model, max_norm=0.01, group=None)

    torch.testing.assert_close(norm, expected)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-4, atol=0.0)  # clipping adds 1e-6 to the norm


@pytest.mark.parametrize("max_norm", [0.0, 1e9], ids=["off", "larger than the norm"])
def test_gradients_that_need_no_clipping_stay_as_they_are(max_norm: float) -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    clip_gradients(model, max_norm=max_norm, group=None)
    assert torch.equal(model.weight.grad, before)


def test_a_parameter_without_a_gradient_does_not_count() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad = False
    model(torch.ones(1, 4)).sum().backward()
    assert float(clip_gradients(model, max_norm=1.0, group=None)) == pytest.approx(4.0)
