"""Whole models, sharded, against their plain references in float64: loss, logits and every gradient."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config import ModelParallelConfig, TransformerConfig
from shiplap.config.model import RopeScaling
from shiplap.dist.collectives import Group
from shiplap.models.decoder import build_model
from shiplap.parallel import Recompute, apply_recompute
from shiplap.tensor_parallel.parameters import gather_to_first, named_placements
from shiplap.tensor_parallel.placement import Placement, along_tp
from tests.cases import references

# Vocabulary and sequence length that no TP size here divides.
VOCABULARY = 37
_GPT2 = TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=8,
    ffn_hidden_size=64,
    max_sequence_length=16,
    initializer_range=0.2,
)
# Heads whose size is not H / heads, shared keys and values, and wavelengths in all three ranges of the stretching.
_LLAMA3 = replace(
    _GPT2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=8,
    rope_scaling=RopeScaling(factor=8.0, original_max_sequence_length=64),
    tie_embeddings=False,
)
CONFIGS = {
    "gpt2": _GPT2,
    "llama3": _LLAMA3,
    "qwen3": replace(_LLAMA3, rope_scaling=None, tie_embeddings=True, norm_epsilon=1e-6),
    "mixtral": replace(_LLAMA3, rope_scaling=None, num_experts=4, router_aux_loss_coefficient=0.5),
    "mixtral, all experts": replace(
        _LLAMA3, rope_scaling=None, num_experts=4, num_experts_per_token=4, router_aux_loss_coefficient=0.5
    ),
    # Fewer key-value heads than ranks, or a number of them that no TP size divides.
    **{
        f"llama3, {heads} key-value heads": replace(_LLAMA3, num_attention_heads=24, num_key_value_heads=heads)
        for heads in (1, 2, 3)
    },
}
Reference = Callable[[dict[str, Tensor], Tensor, TransformerConfig], tuple[Tensor, Tensor]]
NOTHING = torch.zeros(())
REFERENCES: dict[str, Reference] = {
    "gpt2": lambda *arguments: (references.gpt2(*arguments), NOTHING),
    "llama3": lambda *arguments: (references.llama3(*arguments), NOTHING),
    "qwen3": lambda *arguments: (references.llama3(*arguments), NOTHING),
    "mixtral": references.mixtral,
}
SEQUENCE, BATCH = 13, 3


def dtypes(name: str) -> list[torch.dtype]:
    """The dtypes in which a model is compared.

    An expert is taken or not: near a tie bfloat16 decides otherwise, and everything after it differs. So experts are
    compared in bfloat16 where all are taken.
    """
    return [torch.float32] if name == "mixtral" else [torch.float32, torch.bfloat16]


def build(
    name: str, parallel: ModelParallelConfig, group: Group, *, recompute: Recompute = "none", dropout: float = 0.0
) -> nn.Module:
    """The model under test, by its key in `CONFIGS`.

    Biases and norms are away from their trivial initial values, alike on all ranks.
    """
    torch.manual_seed(5)
    config = replace(CONFIGS[name], dropout=dropout)
    model = build_model(name.split(",")[0], config, parallel=parallel, group=group, seed=5)
    apply_recompute(model, recompute)
    placements = dict(named_placements(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                full = torch.randn(placements[name].full_shape) * 0.1
                parameter.add_(placements[name].take(full, along_tp(group)))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets `[B, S]`, some of the targets not counted."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1, 4:9] = -100
    return tokens[:, :-1], targets


def full_parameters(model: nn.Module, group: Group, *, grads: bool = False) -> dict[str, Tensor]:
    """The whole parameters, or their whole gradients, gathered from all ranks."""
    whole = {}
    placements = dict(named_placements(model))
    for name, parameter in model.named_parameters():
        local = parameter.grad if grads else parameter.detach()
        if local is None:
            assert not parameter.requires_grad, name
            continue
        whole[name] = gathered(local, placements[name], group)
    return whole


def gathered(local: Tensor, placement: Placement, group: Group) -> Tensor:
    """The whole of a tensor, on every rank; the ranks agree where they hold the same."""
    whole = gather_to_first(local, placement, group)
    if group is None:
        assert whole is not None
        return whole.to(local.device)
    whole = local.new_empty(placement.full_shape) if whole is None else whole.to(local.device)
    dist.broadcast(whole, group=group.process_group, group_src=0)
    assert torch.equal(placement.take(whole, along_tp(group)), local.detach())
    return whole


def check(
    name: str,
    parallel: ModelParallelConfig,
    group: Group,
    *,
    recompute: Recompute,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[str]:
    """Loss, logits and every gradient of the sharded model against the plain one; what is wrong, as text."""
    model = build(name, parallel, group, recompute=recompute).to(device)
    tokens, targets = batch()
    logits_weight = torch.randn(BATCH, SEQUENCE, VOCABULARY, generator=torch.Generator().manual_seed(8))
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens.to(device), targets.to(device))
        logits = model(tokens.to(device))
    (loss + (logits * logits_weight.to(device)).mean()).backward()

    parameters = {name: value.double().cpu().requires_grad_() for name, value in full_parameters(model, group).items()}
    expected_logits, auxiliary_loss = REFERENCES[name.split(",")[0]](parameters, tokens, CONFIGS[name])
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), targets.flatten()) + auxiliary_loss
    (expected_loss + (expected_logits * logits_weight.double()).mean()).backward()

    # float32: a few hundred operations deep, 2^-24 each. bfloat16: some thirty roundings of 2^-9 follow each other,
    # and the gradients of weights that barely matter carry the noise of those that do. Largest seen: 1.4e-6 and 5.6e-2.
    close = 5e-6 if dtype == torch.float32 else 8e-2
    got = {"loss": loss.detach(), "logits": logits.detach()} | full_parameters(model, group, grads=True)
    expected = {"loss": expected_loss.detach(), "logits": expected_logits.detach()}
    expected |= {name: p.grad for name, p in parameters.items() if p.grad is not None}
    failures = []
    for key, reference in expected.items():
        error = float((got[key].double().cpu() - reference).norm() / reference.norm())
        if not error <= close:
            failures.append(f"{key} is off by {error:.1e}, more than {close:.0e}")
    if got["logits"].shape != (BATCH, SEQUENCE, VOCABULARY):
        failures.append(f"logits are {tuple(got['logits'].shape)}")
    return failures
