"""Adapters in whole models, sharded, against plain float64 models with `W + s B A` for a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.lora import Adapters, add_adapters, find_targets
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.tensor_parallel.placement import along_tp
from tests.cases import models

RANK, ALPHA = 3, 5.0


def build(
    name: str, parallel: ModelParallelConfig, group: Group, *, targets: tuple[str, ...], dropout: float = 0.0
) -> nn.Module:
    """A model with adapters that do something: `up` is not 0."""
    model = models.build(name, parallel, group)
    config = models.CONFIGS[name]
    found = find_targets(name.split(",")[0], config, targets)
    add_adapters(model, Adapters(targets=tuple(found), rank=RANK, alpha=ALPHA, dropout=dropout), seed=5)
    placements = dict(named_placements(model))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("adapter.up"):
                full = torch.randn(placements[key].full_shape) * 0.3
                parameter.copy_(placements[key].take(full, along_tp(group)))
    return model


def reference_weights(name: str, whole: dict[str, Tensor], targets: tuple[str, ...]) -> dict[str, Tensor]:
    """The parameters of a model without adapters that computes the same."""
    weights = {key: value for key, value in whole.items() if ".adapter." not in key}
    for target in find_targets(name.split(",")[0], models.CONFIGS[name], targets):
        down, up = (whole[f"{target.layer}.adapter.{factor}"] for factor in ("down", "up"))
        key = f"{target.layer}.weight"
        rows = torch.cat([torch.arange(part.rows.start, part.rows.stop) for part in target.parts])
        sizes = [len(part.rows) for part in target.parts]
        deltas = [b @ a for a, b in zip(down.split(RANK), up.split(sizes), strict=True)]
        weights[key] = weights[key].index_add(0, rows, ALPHA / RANK * torch.cat(deltas))
    return weights


def check(
    name: str,
    parallel: ModelParallelConfig,
    group: Group,
    *,
    targets: tuple[str, ...],
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[str]:
    """Loss, logits and every gradient against the plain model; what is wrong, as text."""
    model = build(name, parallel, group, targets=targets).to(device)
    tokens, labels = models.batch()
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens.to(device), labels.to(device))
        logits = model(tokens.to(device))
    loss.backward()
    if wrong := [key for key, p in model.named_parameters() if (p.grad is not None) != (".adapter." in key)]:
        return [f"gradients of {wrong}"]

    whole = {key: value.double().cpu() for key, value in models.full_parameters(model, group).items()}
    factors = {key: value.requires_grad_() for key, value in whole.items() if ".adapter." in key}
    reference = models.REFERENCES[name.split(",")[0]]
    expected_logits, auxiliary = reference(reference_weights(name, whole, targets), tokens, models.CONFIGS[name])
    (F.cross_entropy(expected_logits.flatten(0, 1), labels.flatten()) + auxiliary).backward()

    close = 5e-6 if dtype == torch.float32 else 8e-2  # as in tests/cases/models.py
    got = {"logits": logits.detach()} | models.full_parameters(model, group, grads=True)
    expected = {"logits": expected_logits.detach()} | {key: p.grad for key, p in factors.items() if p.grad is not None}
    failures = []
    for key, value in expected.items():
        error = float((got[key].double().cpu() - value).norm() / value.norm())
        if not error <= close:
            failures.append(f"{dtype}: {key} is off by {error:.1e}, more than {close:.0e}")
    return failures
