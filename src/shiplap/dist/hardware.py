"""What this machine computes with, by name."""

import os
import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Of the accelerator; or of the processor, and what PyTorch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def ranks_per_host() -> int:
    """Of this job, on this host; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
