"""Low-rank adapters (Hu et al. 2021): which layers they stand beside, and how they come and go."""

from shiplap.lora.adapters import Adapters, add_adapters, merge, merged, remove_adapters, unmerge
from shiplap.lora.targets import find_targets

__all__ = ["Adapters", "add_adapters", "find_targets", "merge", "merged", "remove_adapters", "unmerge"]
