"""Low-rank adapters: what is adapted, how, and where adapters are kept."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from shiplap.config.option import UserError, flag_of, option


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Fine-tune low-rank adapters (LoRA) and leave the model's own weights as they are."""

    lora_rank: int | None = option(None, "Rank of new adapters; turns LoRA on. See also --lora-load-path.")
    DEFAULT_ALPHA: ClassVar[float] = 16.0

    lora_alpha: float | None = option(
        None, "Adapters count alpha / rank. Default: 16, or what the loaded adapters were made with."
    )
    lora_dropout: float | None = option(
        None, "Dropout probability of the adapters' input. Default: 0, or what the loaded adapters were made with."
    )
    lora_target_modules: tuple[str, ...] | None = option(
        None,
        "What new adapters are for: names as in the model (attention.qkv, fc2 …) or as Hugging Face's (q_proj, "
        "gate_proj, c_attn …). Default: all-linear, which is everything that can be adapted.",
    )
    lora_load_path: str | None = option(None, "Folder with adapters in PEFT's format to go on from; turns LoRA on.")
    lora_save_path: str | None = option(None, "New folder for the trained adapters, in PEFT's format.")

    def __post_init__(self) -> None:
        """Refuse what makes no adapter, and LoRA flags without LoRA."""
        if self.lora_rank is not None and self.lora_rank < 1:
            raise UserError(f"--lora-rank must be at least 1, got {self.lora_rank}.")
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            raise UserError(f"--lora-alpha must be above 0, got {self.lora_alpha}.")
        if self.lora_dropout is not None and not 0.0 <= self.lora_dropout < 1.0:
            raise UserError(f"--lora-dropout must be in [0, 1), got {self.lora_dropout}.")
        if self.lora_target_modules == ():
            raise UserError("--lora-target-modules names nothing; drop it for all linear layers.")
        if self.lora_target_modules and self.lora_load_path is not None:
            raise UserError(
                f"--lora-target-modules {' '.join(self.lora_target_modules)}: the adapters in --lora-load-path "
                f"{self.lora_load_path} are for what they were made for. Drop one of the two flags."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not self.is_on:
                raise UserError(
                    f"{flag_of(field)} {value}, but there are no adapters: give --lora-rank for new ones, or "
                    "--lora-load-path."
                )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank is not None or self.lora_load_path is not None

    def check_agrees_with(self, *, rank: int, alpha: float) -> None:
        """Refuse a rank or an alpha that the loaded adapters do not have.

        Raises:
            UserError: naming both numbers.
        """
        for flag, asked, loaded in (("--lora-rank", self.lora_rank, rank), ("--lora-alpha", self.lora_alpha, alpha)):
            if asked is not None and asked != loaded:
                raise UserError(
                    f"{flag} is {asked}, but the adapters in --lora-load-path {self.lora_load_path} have {loaded}. "
                    "Drop the flag."
                )
