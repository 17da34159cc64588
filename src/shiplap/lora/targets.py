"""Which linear layers, and which parts of fused ones, a name of the user's or of a file means."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from shiplap.config import TransformerConfig, UserError
from shiplap.families import Stored, huggingface_names

ALL_LINEAR = "all-linear"
_LAYER = re.compile(r"(blocks\.\d+\.(?:attention|mlp)\.(qkv|proj|fc1|fc2))\.weight")
_PREFIX = "base_model.model."
"""Stands before every module's name in PEFT's files."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a layer that is adapted by itself.

    Attributes:
        module: what Hugging Face's model calls it, such as `model.layers.0.self_attn.q_proj`.
        rows: its rows of the layer's full weight.
    """

    module: str
    rows: range


@dataclass(frozen=True, kw_only=True)
class Target:
    """A layer with its parts, or those of them that are adapted.

    Attributes:
        layer: its path in the model, such as `blocks.0.attention.qkv`.
        parts: in the order of their rows.
        num_inputs: the layer's full input size.
    """

    layer: str
    parts: tuple[Part, ...]
    num_inputs: int


def all_targets(family: str, config: TransformerConfig) -> list[Target]:
    """Every layer that can be adapted, with all of its parts. Experts cannot be."""
    num_inputs = {
        "qkv": config.hidden_size,
        "proj": config.num_attention_heads * config.head_size,
        "fc1": config.hidden_size,
        "fc2": config.ffn_hidden_size,
    }
    targets = []
    for name, stored in huggingface_names(family, config).items():
        match = _LAYER.fullmatch(name)
        if match and not (config.num_experts and ".mlp." in name):
            parts = tuple(_parts(stored))
            targets.append(Target(layer=match[1], parts=parts, num_inputs=num_inputs[match[2]]))
    return targets


def _parts(stored: Stored) -> Iterator[Part]:
    start = 0
    for name, rows in stored.parts:
        yield Part(module=name.removesuffix(".weight"), rows=range(start, start + rows))
        start += rows


def find_targets(family: str, config: TransformerConfig, names: Sequence[str]) -> list[Target]:
    """The layers and parts that the names mean; a name means every path that it is, or ends.

    Args:
        family: the model's family.
        config: its sizes.
        names: paths in the model or in Hugging Face's, or their ends; a fused layer means all of its parts.
            `all-linear` means everything.

    Raises:
        UserError: a name means nothing; lists what there is.
    """
    available = all_targets(family, config)
    found: list[Target] = []
    for target in available:
        parts = tuple(part for part in target.parts if any(_means(name, target.layer, part.module) for name in names))
        if parts:
            found.append(replace(target, parts=parts))
    for name in names:
        if not any(_means(name, target.layer, part.module) for target in found for part in target.parts):
            raise UserError(
                f"--lora-target-modules {name} matches nothing. There is {_kinds(available)}, and {ALL_LINEAR}."
                + (" Experts cannot be adapted." if config.num_experts else "")
            )
    return found


def _means(name: str, layer: str, module: str) -> bool:
    return name == ALL_LINEAR or any(path == name or path.endswith(f".{name}") for path in (layer, module))


def _kinds(targets: Sequence[Target]) -> str:
    """The kinds of layers, by both models' names, such as `attention.proj (self_attn.o_proj)`."""
    kinds = {}
    for target in targets:
        modules = [".".join(part.module.split(".")[-2:]) for part in target.parts]
        kinds[".".join(target.layer.split(".")[-2:])] = ", ".join(modules)
    return ", ".join(f"{layer} ({modules})" for layer, modules in kinds.items())


def targets_of_modules(family: str, config: TransformerConfig, modules: Collection[str]) -> list[Target]:
    """The layers and parts that exactly these Hugging Face modules are.

    Raises:
        UserError: there is no such layer, or it cannot be adapted.
    """
    available = all_targets(family, config)
    known = {part.module for target in available for part in target.parts}
    if unknown := sorted(set(modules) - known):
        raise UserError(f"an adapter is for {unknown[0]}, but what can be adapted here is {_kinds(available)}.")
    chosen = [
        replace(target, parts=tuple(part for part in target.parts if part.module in modules)) for target in available
    ]
    return [target for target in chosen if target.parts]


def module_names(family: str, config: TransformerConfig, targets: Sequence[Target]) -> list[str]:
    """Short names for `adapter_config.json`: ends of paths that mean these modules and no others."""
    modules = {part.module for target in targets for part in target.parts}
    every = {part.module for target in all_targets(family, config) for part in target.parts}

    def shortest(module: str) -> str:
        words = module.split(".")
        for count in range(1, len(words)):
            end = ".".join(words[-count:])
            if all(other in modules for other in every if other.endswith(f".{end}")):
                return end
        return module

    return sorted({shortest(module) for module in modules})


def stored_names(targets: Sequence[Target], *, rank: int) -> dict[str, Stored]:
    """The parameters of the targets' adapters, as the tensors that PEFT saves."""
    names = {}
    for target in targets:
        factors = [factor_names(part.module) for part in target.parts]
        downs = tuple((down, rank) for down, _ in factors)
        ups = tuple((up, len(part.rows)) for (_, up), part in zip(factors, target.parts, strict=True))
        names[f"{target.layer}.adapter.down"] = Stored(parts=downs)
        names[f"{target.layer}.adapter.up"] = Stored(parts=ups)
    return names


def factor_names(module: str) -> tuple[str, str]:
    """The tensors A and B of a module's adapter."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def module_of(tensor: str) -> str | None:
    """The module that a tensor of PEFT's belongs to; None if it is not one of an adapter's factors."""
    match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight", tensor)
    return match[1] if match else None
