"""LLaMA 3 (Grattafiori et al. 2024): RMS norm, rotary positions, grouped queries, SwiGLU; no biases."""

from collections.abc import Callable

from torch import nn

from shiplap.layers.mlp import SwigluMLP
from shiplap.layers.norm import RMSNorm
from shiplap.layers.positions import RotaryPositions
from shiplap.models.build import Build
from shiplap.models.decoder import DecoderModel


class Llama3(DecoderModel):
    """The whole model; this rank's shard of it."""

    def make_norm(self, build: Build) -> nn.Module:
        """RMS norm."""
        return RMSNorm(build.config.hidden_size, eps=build.config.norm_epsilon, group=build.token_group)

    def make_attention(self, build: Build) -> nn.Module:
        """Grouped-query attention with rotary positions."""
        config = build.config
        positions = RotaryPositions(config.head_size, theta=config.rope_theta, scaling=config.rope_scaling)
        return build.attention(bias=False, positions=positions, query_key_norm=self.query_key_norm(build))

    def query_key_norm(self, build: Build) -> Callable[[], nn.Module] | None:
        """Makes the norm of queries and keys, where the family has one; LLaMA 3 has none."""
        return None

    def make_mlp(self, build: Build) -> nn.Module:
        """SwiGLU."""
        return build.mlp(SwigluMLP)
