"""Checking the parallel layers on this machine. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shiplap.config.option import check_at_least, option
from shiplap.config.parallel import ModelParallelConfig


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is checked, and where."""

    tensor_parallel_size: int = option(
        2,
        "Tensor-parallel size (TP), in ranks. As many local workers are started when not under torchrun; there, every "
        "TP group checks the same by itself.",
        flag="tensor-parallel",
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Device of every rank.")
    dtype: Literal["float32", "bfloat16", "both"] = option("both", "Type of parameters and computation.")
    quick: bool = option(
        False,
        "Only the plans of no sequence parallelism, nothing overlapped, the default switches, and all switches on; "
        "otherwise every plan that switches can make, and methods that no switch chooses.",
    )
    json_file: str | None = option(None, "File for the results and all failures, as JSON.", flag="json")

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        check_at_least(self, 1, "tensor_parallel_size")

    @property
    def parallel(self) -> ModelParallelConfig:
        """The topology."""
        return ModelParallelConfig(tensor_parallel_size=self.tensor_parallel_size)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types to check, one after the other."""
        return ("float32", "bfloat16") if self.dtype == "both" else (self.dtype,)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """One call of `shiplap verify`."""

    check: CheckOptions = dataclasses.field(default_factory=CheckOptions)
