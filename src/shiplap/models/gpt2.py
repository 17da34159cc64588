"""GPT-2 (Radford et al. 2019): learned positions, layer norm, biases, GELU."""

from torch import nn

from shiplap.layers.mlp import GeluMLP
from shiplap.layers.norm import LayerNorm
from shiplap.layers.positions import LearnedPositions
from shiplap.models.build import Build
from shiplap.models.decoder import DecoderModel


class GPT2(DecoderModel):
    """The whole model; this rank's shard of it."""

    def make_positions(self, build: Build) -> nn.Module:
        """A learned vector per position."""
        config = build.config
        return LearnedPositions(
            config.max_sequence_length, config.hidden_size, group=build.token_group, init=build.init
        )

    def make_norm(self, build: Build) -> nn.Module:
        """Layer norm."""
        return LayerNorm(build.config.hidden_size, eps=build.config.norm_epsilon, group=build.token_group)

    def make_attention(self, build: Build) -> nn.Module:
        """Multi-head attention with biases."""
        return build.attention(bias=True)

    def make_mlp(self, build: Build) -> nn.Module:
        """GELU, with biases."""
        return build.mlp(GeluMLP)
