"""Low-rank adapters: what is adapted, how, and where adapters are kept."""

from dataclasses import dataclass

from shiplap.config.errors import UserError
from shiplap.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Fine-tune low-rank adapters (LoRA) and leave the model's own weights as they are."""

    lora_rank: int | None = option(None, "Rank of new adapters; turns LoRA on. See also --lora-load-path.")
    lora_alpha: float | None = option(
        None, "Adapters count alpha / rank. Default: 16, or what the loaded adapters were made with."
    )
    lora_dropout: float = option(0.0, "Dropout probability of the adapters' input.")
    lora_target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "What is adapted: names as in the model (attention.qkv, fc2 …) or as Hugging Face's (q_proj, gate_proj, "
        "c_attn …); `all-linear` is everything that can be.",
    )
    lora_load_path: str | None = option(None, "Folder with adapters in PEFT's format to go on from; turns LoRA on.")
    lora_save_path: str | None = option(None, "New folder for the trained adapters, in PEFT's format.")

    def __post_init__(self) -> None:
        """Refuse what makes no adapter, and LoRA flags without LoRA."""
        if self.lora_rank is not None and self.lora_rank < 1:
            raise UserError(f"--lora-rank must be at least 1, got {self.lora_rank}.")
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            raise UserError(f"--lora-alpha must be above 0, got {self.lora_alpha}.")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise UserError(f"--lora-dropout must be in [0, 1), got {self.lora_dropout}.")
        if not self.lora_target_modules:
            raise UserError("--lora-target-modules names nothing; drop it for all linear layers.")
        if not self.is_on and self.lora_save_path is not None:
            raise UserError(
                f"--lora-save-path {self.lora_save_path}, but there are no adapters: give --lora-rank for new ones, or "
                "--lora-load-path."
            )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank is not None or self.lora_load_path is not None
