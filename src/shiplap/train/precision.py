"""The type that a forward pass computes in."""

import torch


def computing_in(dtype: str, device: torch.device) -> torch.autocast:
    """Run a forward pass inside: `bfloat16` means autocast, `float32` nothing. Parameters are float32 either way."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
