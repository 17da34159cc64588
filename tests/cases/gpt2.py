"""GPT-2 written again, plainly, on full float64 parameters: what the sharded model must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group, all_gather
from shiplap.config import ModelParallelConfig, TransformerConfig
from shiplap.models.registry import build_model
from shiplap.tensor_parallel.shard import named_shards

# Vocabulary and sequence length that no TP size here divides.
CONFIG = TransformerConfig(
    vocab_size=37,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=8,
    ffn_hidden_size=64,
    max_sequence_length=16,
    initializer_range=0.2,
)
SEQUENCE, BATCH = 13, 3


def build(parallel: ModelParallelConfig, group: Group, *, recompute: str = "none", dropout: float = 0.0) -> nn.Module:
    """The model under test; biases and norms away from their trivial initial values, alike on all ranks."""
    torch.manual_seed(5)
    config = TransformerConfig(**{**vars(CONFIG), "dropout": dropout})
    model = build_model("gpt2", config, parallel=parallel, group=group, recompute=recompute)
    tp = parallel.tensor_parallel_size
    rank = 0 if group is None else torch.distributed.get_rank(group)
    shards = dict(named_shards(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                shard = shards[name]
                full = torch.randn(shard.full_shape if shard else parameter.shape) * 0.1
                parameter.add_(shard.shard(full, rank, tp) if shard else full)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets `[B, S]`, some of the targets not counted."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1, 4:9] = -100
    return tokens[:, :-1], targets


def full_parameters(model: nn.Module, group: Group, *, grads: bool = False) -> dict[str, Tensor]:
    """The whole parameters, or their whole gradients, gathered from all ranks."""
    whole = {}
    shards = dict(named_shards(model))
    for name, parameter in model.named_parameters():
        local = parameter.grad if grads else parameter.detach()
        assert local is not None, name
        shard = shards[name]
        if shard is not None:
            local = shard.full(tuple(all_gather(local[None], group).wait()))
        whole[name] = local.detach().clone()
    return whole


def reference_logits(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """`[B, S, V]` from full parameters."""
    p = parameters
    batch_size, sequence = tokens.shape
    x = p["embedding.weight"][tokens] + p["positions.weight"][:sequence]
    hidden, heads = CONFIG.hidden_size, CONFIG.num_attention_heads

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (hidden,), p[f"{name}.weight"], p[f"{name}.bias"], CONFIG.layer_norm_epsilon)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].t() + p[f"{name}.bias"]

    mask = torch.full((sequence, sequence), float("-inf"), dtype=x.dtype).triu(1)
    for i in range(CONFIG.num_layers):
        block = f"blocks.{i}"
        qkv = linear(f"{block}.attention.qkv", norm(f"{block}.attention_norm", x))
        q, k, v = qkv.view(batch_size, sequence, heads, 3, hidden // heads).permute(3, 0, 2, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (hidden // heads) ** 0.5 + mask).softmax(-1)
        context = (weights @ v).transpose(1, 2).reshape(batch_size, sequence, hidden)
        x = x + linear(f"{block}.attention.proj", context)
        y = linear(f"{block}.mlp.fc1", norm(f"{block}.mlp_norm", x))
        x = x + linear(f"{block}.mlp.fc2", F.gelu(y, approximate="tanh"))
    return norm("final_norm", x) @ p["embedding.weight"].t()


def check(
    parallel: ModelParallelConfig, group: Group, *, recompute: str, dtype: torch.dtype, device: str = "cpu"
) -> list[str]:
    """Loss, logits and every gradient of the sharded model against the plain one; what is wrong, as text."""
    model = build(parallel, group, recompute=recompute).to(device)
    tokens, targets = batch()
    logits_weight = torch.randn(BATCH, SEQUENCE, CONFIG.vocab_size, generator=torch.Generator().manual_seed(8))
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens.to(device), targets.to(device))
        logits = model(tokens.to(device))
    (loss + (logits * logits_weight.to(device)).mean()).backward()

    parameters = {name: value.double().cpu().requires_grad_() for name, value in full_parameters(model, group).items()}
    expected_logits = reference_logits(parameters, tokens)
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), targets.flatten())
    (expected_loss + (expected_logits * logits_weight.double()).mean()).backward()

    # float32: a few hundred operations deep, 2^-24 each. bfloat16: some thirty roundings of 2^-9 follow each other,
    # and the gradients of weights that barely matter carry the noise of those that do.
    close = 2e-5 if dtype == torch.float32 else 8e-2
    got = {"loss": loss.detach(), "logits": logits.detach()} | full_parameters(model, group, grads=True)
    expected = {"loss": expected_loss.detach(), "logits": expected_logits.detach()}
    expected |= {name: p.grad for name, p in parameters.items() if p.grad is not None}
    failures = []
    for name, reference in expected.items():
        error = float((got[name].double().cpu() - reference).norm() / reference.norm())
        if not error <= close:
            failures.append(f"{name} is off by {error:.1e}, more than {close:.0e}")
    if got["logits"].shape != (BATCH, SEQUENCE, CONFIG.vocab_size):
        failures.append(f"logits are {tuple(got['logits'].shape)}")
    return failures
