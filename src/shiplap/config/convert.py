"""Converting a model on disk. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shiplap.config.option import UserError, option


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """How the weights are written."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = option(
        "keep", "Type of the weights in the new files; keep: each as it is."
    )
    lora: str | None = option(None, "Folder with adapters in PEFT's format, which are merged into the weights.")
    max_file_gb: float = option(
        5.0, "Largest size of one file of weights, in GB (1e9 bytes); so much is also held in memory."
    )

    def __post_init__(self) -> None:
        """Refuse a size that holds nothing."""
        if not self.max_file_gb > 0:
            raise UserError(f"--max-file-gb must be above 0, got {self.max_file_gb}.")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """One call of `shiplap convert`, but for where from and where to."""

    weights: WeightOptions = dataclasses.field(default_factory=WeightOptions)
