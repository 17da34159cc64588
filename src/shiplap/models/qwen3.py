"""Qwen3 (Yang et al. 2025): LLaMA's block with a norm over each head's queries and keys."""

from collections.abc import Callable
from functools import partial

from torch import nn

from shiplap.layers.norm import RMSNorm
from shiplap.models.build import Build
from shiplap.models.llama3 import Llama3


class Qwen3(Llama3):
    """The whole model; this rank's shard of it."""

    def query_key_norm(self, build: Build) -> Callable[[], nn.Module]:
        """A norm over the head's size. A rank sees its own heads only, with and without sequence parallelism."""
        return partial(RMSNorm, build.config.head_size, eps=build.config.norm_epsilon, group=build.group)
