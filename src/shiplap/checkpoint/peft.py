"""Low-rank adapters on disk, in the format of the PEFT library, whatever the TP size."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shiplap.checkpoint.huggingface_writer import whole_or_not_at_all
from shiplap.checkpoint.load import check_tensors, load_weights
from shiplap.checkpoint.safetensors_files import SafetensorsFiles
from shiplap.config import TransformerConfig, UserError
from shiplap.config.json_fields import JsonFields, read_json_object
from shiplap.dist.collectives import Group
from shiplap.families import huggingface_names
from shiplap.lora import Adapters, add_adapters
from shiplap.lora.targets import factor_names, module_names, module_of, stored_names, targets_of_modules
from shiplap.tensor_parallel.parameters import gather_to_first, named_placements

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def read_adapters(directory: str, *, family: str, config: TransformerConfig) -> Adapters:
    """What kind of adapters a folder holds; their names and shapes are checked against the model.

    Args:
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        family: of the model that they are for.
        config: its sizes.

    Raises:
        UserError: a file is missing, damaged or describes something that is not supported; adapters are for layers that
            this model does not have, or for other shapes.
    """
    adapters, _ = _open(directory, family, config)
    return adapters


def load_adapters(
    model: nn.Module,
    directory: str,
    *,
    family: str,
    config: TransformerConfig,
    group: Group,
    dropout: float | None = None,
) -> Adapters:
    """Put the adapters of a folder into a model, each rank reading its slices, and freeze everything else.

    Args:
        model: this rank's shard of the model.
        directory: as for `read_adapters`.
        family: of the model.
        config: its sizes.
        group: the TP ranks.
        dropout: probability, of the adapters' input; None: as the folder says.

    Raises:
        UserError: as `read_adapters`.
    """
    adapters, files = _open(directory, family, config)
    if dropout is not None:
        adapters = replace(adapters, dropout=dropout)
    add_adapters(model, adapters, seed=None)
    load_weights(model, files, stored_names(adapters.targets, rank=adapters.rank), group=group)
    return adapters


def _open(directory: str, family: str, config: TransformerConfig) -> tuple[Adapters, SafetensorsFiles]:
    rank, alpha, dropout = _read_config(Path(directory) / CONFIG_FILE)
    weights = Path(directory) / WEIGHTS_FILE
    if not weights.exists() and (Path(directory) / "adapter_model.bin").exists():
        raise UserError(
            f"{directory} holds adapter_model.bin but no {WEIGHTS_FILE}. The former is a pickle, which can run any "
            "program when it is loaded, so shiplap never reads one. PEFT makes the latter with save_pretrained."
        )
    if not weights.exists():
        raise UserError(f"{directory} holds no {WEIGHTS_FILE}, so there are no adapters in it.")
    files = SafetensorsFiles(directory, [weights])
    modules = set()
    for name in files.shapes:
        module = module_of(name)
        if module is None:
            raise UserError(f"{weights}: {name} is not a factor of a low-rank adapter, and nothing else is supported.")
        modules.add(module)
    try:
        targets = targets_of_modules(family, config, modules)
    except UserError as error:
        raise UserError(f"{weights}: {error}") from None
    adapters = Adapters(targets=tuple(targets), rank=rank, alpha=alpha, dropout=dropout)
    _check_shapes(files, adapters)
    return adapters, files


def _check_shapes(files: SafetensorsFiles, adapters: Adapters) -> None:
    expected = {}
    for target in adapters.targets:
        num_parts, num_rows = len(target.parts), sum(len(part.rows) for part in target.parts)
        expected[f"{target.layer}.adapter.down"] = (num_parts * adapters.rank, target.num_inputs)
        expected[f"{target.layer}.adapter.up"] = (num_rows, adapters.rank)
    check_tensors(files, stored_names(adapters.targets, rank=adapters.rank), expected)


def _read_config(path: Path) -> tuple[int, float, float]:
    """Rank, alpha and dropout; everything that would make another computation is refused."""
    fields = JsonFields(str(path), read_json_object(path))
    fields.must_be("peft_type", "LORA")
    fields.must_be("bias", "none")
    # Other ways of drawing the factors also change the model's own weights, which such a file does not hold.
    fields.must_be("init_lora_weights", True, False, "gaussian", "orthogonal")
    # Which layers are adapted is seen from the tensors; the rest describes where the file comes from.
    fields.ignore(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "task_type",
        "base_model_name_or_path",
        "inference_mode",
        "auto_mapping",
        "revision",
        "megatron_core",
        "qalora_group_size",
        "peft_version",
    )
    rank, alpha = fields.integer("r"), fields.number("lora_alpha")
    dropout = fields.number("lora_dropout", 0.0)
    if dropout >= 1.0:
        raise UserError(f"{path}: lora_dropout must be below 1, got {dropout}.")
    fields.refuse_others()
    return rank, alpha, dropout


def save_adapters(
    model: nn.Module,
    directory: str,
    adapters: Adapters,
    *,
    family: str,
    config: TransformerConfig,
    group: Group,
    base_model: str | None = None,
) -> None:
    """Write a model's adapters, gathered on the first rank, as a folder that PEFT loads.

    All TP ranks of one replica must call it. The first may fail alone, so run it inside `fail_together()`.

    Args:
        model: this rank's shard of the model.
        directory: absent or empty.
        adapters: what `add_adapters` or `load_adapters` put in.
        family: of the model.
        config: its sizes.
        group: the TP ranks.
        base_model: where the model's own weights are, for readers of the file.

    Raises:
        UserError: on the first rank, if the directory cannot be written.
    """
    tensors = _gathered(model, adapters, group)
    if group is not None and group.rank > 0:
        return
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": module_names(family, config, adapters.targets),
        "bias": "none",
        "fan_in_fan_out": any(stored.transposed for stored in huggingface_names(family, config).values()),
        "inference_mode": True,
    }
    with whole_or_not_at_all(Path(directory)) as folder:
        from safetensors.torch import save_file

        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _gathered(model: nn.Module, adapters: Adapters, group: Group) -> dict[str, Tensor]:
    """All factors by PEFT's names, on the first rank; they are small."""
    parameters, placements = dict(model.named_parameters()), dict(named_placements(model))
    tensors: dict[str, Tensor] = {}
    for name, stored in stored_names(adapters.targets, rank=adapters.rank).items():
        whole = gather_to_first(parameters[name].detach(), placements[name], group)
        if whole is not None:
            parts = whole.split([rows for _, rows in stored.parts])
            tensors |= {part: tensor.contiguous() for (part, _), tensor in zip(stored.parts, parts, strict=True)}
    return tensors


class MergedAdapters:
    """Adds a folder's adapters to whole parameters, one at a time, where there is no model.

    Attributes:
        num_layers: that are adapted.
    """

    def __init__(self, directory: str, *, family: str, config: TransformerConfig) -> None:
        """Read the headers.

        Raises:
            UserError: as `read_adapters`.
        """
        self._adapters, self._files = _open(directory, family, config)
        self._targets = {f"{target.layer}.weight": target for target in self._adapters.targets}
        self.num_layers = len(self._targets)

    def __call__(self, name: str, whole: Tensor) -> Tensor:
        """The whole parameter, merged; computed in float32 and rounded once."""
        target = self._targets.get(name)
        if target is None:
            return whole
        merged = whole.to(torch.float32, copy=True)
        for part in target.parts:
            merged[part.rows.start : part.rows.stop] += self._delta(part.module)
        return merged.to(whole.dtype)

    def _delta(self, module: str) -> Tensor:
        down, up = (self._files.read(name, (slice(None), slice(None))).float() for name in factor_names(module))
        return self._adapters.scale * (up @ down)
