"""Writing text with a trained model. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shiplap.config.option import UserError, check_at_least, option
from shiplap.config.parallel import ModelParallelConfig


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What to go on with, and how far."""

    prompt: str | None = option(
        None, "Text to go on with. An empty one lets the model begin a text, if its vocabulary can say so."
    )
    prompt_file: str | None = option(
        None, "File with the text to go on with, taken as it stands, instead of --prompt; - is the standard input."
    )
    num_tokens: int = option(100, "Most tokens to write.")
    num_samples: int = option(1, "Number of texts to write, each from the prompt on. Sample i has seed --seed + i.")
    stop: bool = option(
        True,
        "Stop where the model ends the text: at eos_token_id of generation_config.json or config.json, else at the "
        "tokenizer's end of text.",
    )
    lora: str | None = option(None, "Folder with adapters in PEFT's format, which are merged into the model.")
    tokenizer: str | None = option(
        None,
        "A Hugging Face tokenizer.json, or a folder with one; or `bytes`. Default: the model's own; a model with the "
        "vocabulary of bytes has none and needs none.",
    )

    def __post_init__(self) -> None:
        """Refuse no prompt, two prompts, and counts that mean nothing."""
        if (self.prompt is None) == (self.prompt_file is None):
            given = "none is given" if self.prompt is None else "both are given"
            raise UserError(
                f"The text to go on with is --prompt TEXT or --prompt-file FILE (- for the standard input); {given}."
            )
        check_at_least(self, 1, "num_tokens", "num_samples")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn from the model's probabilities: as `transformers` does, in this order."""

    temperature: float = option(0.8, "The logits are divided by this; 0 always takes the likeliest token.")
    top_k: int = option(40, "Draw from the so many likeliest tokens only; 0: from all.")
    top_p: float = option(
        1.0, "Draw from the fewest likeliest tokens whose probability together reaches this only (nucleus); 1: all."
    )
    seed: int = option(1234, "Seed of the draws.")

    def __post_init__(self) -> None:
        """Refuse numbers that give no distribution."""
        check_at_least(self, 0, "temperature", "top_k", "seed")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p must be in (0, 1], got {self.top_p}.")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where it runs. Without sequence parallelism: there is one token at a time, and it cannot be divided."""

    tensor_parallel_size: int = option(
        1,
        "Tensor-parallel size (TP), in ranks: each weight matrix is split over so many. As many local workers are "
        "started when not under torchrun.",
        flag="tensor-parallel",
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Device of every rank.")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Type of parameters and computation: 4 or 2 bytes per parameter."
    )

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        check_at_least(self, 1, "tensor_parallel_size")

    @property
    def parallel(self) -> ModelParallelConfig:
        """The topology."""
        return ModelParallelConfig(tensor_parallel_size=self.tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """One call of `shiplap generate`, but for the model's folder."""

    text: TextOptions
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    machine: MachineOptions = dataclasses.field(default_factory=MachineOptions)
