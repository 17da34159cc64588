"""GPT-2 (Radford et al. 2019): learned positions, layer norm, biases, GELU."""

from torch import nn

from shiplap.layers.attention import SelfAttention
from shiplap.layers.mlp import GeluMLP
from shiplap.layers.norm import LayerNorm
from shiplap.layers.position import LearnedPositions
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
        config = build.config
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            num_key_value_heads=config.key_value_heads,
            head_size=config.head_size,
            parallel=build.parallel,
            group=build.group,
            bias=True,
            dropout=config.dropout,
            init=build.init,
            output_init=build.output_init,
            recompute_core=build.recompute == "selective",
        )

    def make_mlp(self, build: Build) -> nn.Module:
        """GELU, with biases."""
        return GeluMLP(
            build.config.hidden_size,
            build.config.ffn_hidden_size,
            parallel=build.parallel,
            group=build.group,
            init=build.init,
            output_init=build.output_init,
        )
