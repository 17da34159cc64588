"""Families of models: one file each, which says all that is particular to it. To add one, write its file and list it.

Standard library only, like `shiplap.config`.
"""

from shiplap.config.model import TransformerConfig
from shiplap.config.option import UserError
from shiplap.families.family import Architecture, Family, Stored
from shiplap.families.gpt2 import GPT2
from shiplap.families.llama3 import LLAMA3
from shiplap.families.mixtral import MIXTRAL
from shiplap.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Architecture", "Family", "Stored", "huggingface_names", "llmc_names", "preset"]

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT2, LLAMA3, QWEN3, MIXTRAL)}


def preset(family: str, name: str) -> TransformerConfig:
    """The sizes of a named model, such as `preset("gpt2", "gpt2-124m")`.

    Raises:
        UserError: the family has no such preset; the message lists those it has.
    """
    presets = FAMILIES[family].presets
    if name not in presets:
        raise UserError(f"--preset {name}: no such {family} preset; there are {', '.join(presets)}.")
    return presets[name]()


def huggingface_names(family: str, config: TransformerConfig) -> dict[str, Stored]:
    """Every parameter of a model, by its name here, as the tensors that `transformers` saves."""
    return dict(FAMILIES[family].huggingface_names(config))


def llmc_names(family: str, config: TransformerConfig) -> dict[str, Stored]:
    """Every parameter of a model, by its name here, as the tensors of llm.c's model files."""
    names = FAMILIES[family].llmc_names
    assert names is not None, family
    return dict(names(config))
