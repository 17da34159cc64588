"""What a model is built from."""

from dataclasses import dataclass
from functools import partial
from math import sqrt

from torch import nn

from shiplap.config.model import TransformerConfig
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.families import Architecture
from shiplap.layers.attention import SelfAttention
from shiplap.layers.mlp import GeluMLP, SwigluMLP
from shiplap.layers.moe import MixtureOfExperts
from shiplap.layers.norm import LayerNorm, RMSNorm
from shiplap.layers.positions import LearnedPositions, RotaryPositions
from shiplap.tensor_parallel.parameters import ByName


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a model that some ranks have: consecutive blocks, and perhaps one of the ends.

    Attributes:
        blocks: by their number in the whole model.
        has_embedding: whether token ids come in, rather than hidden states.
        has_head: whether a loss or logits go out, rather than hidden states.
    """

    blocks: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, kw_only=True)
class Build:
    """Sizes, topology, and what follows from them for the parts.

    Attributes:
        architecture: what the blocks are made of.
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        stage: the part to build; None: the whole model.
    """

    architecture: Architecture
    config: TransformerConfig
    parallel: ModelParallelConfig
    group: Group
    stage: Stage | None = None

    @property
    def token_group(self) -> Group:
        """The ranks that hold other tokens than this one between the parallel layers; None if there are none."""
        return self.group if self.parallel.sequence_parallel else None

    @property
    def built_stage(self) -> Stage:
        """The part to build."""
        return self.stage or Stage(blocks=range(self.config.num_layers), has_embedding=True, has_head=True)

    @property
    def init(self) -> ByName:
        """Draws initial weights."""
        return self._normal(self.config.initializer_range)

    @property
    def output_init(self) -> ByName:
        """Draws weights of projections into the residual stream: smaller, by the number of them.

        Radford et al. 2019, section 2.3.
        """
        return self._normal(self.config.initializer_range / sqrt(2 * self.config.num_layers))

    def _normal(self, std: float) -> ByName:
        return ByName(partial(nn.init.normal_, std=std))

    def norm(self) -> LayerNorm | RMSNorm:
        """A norm of the residual stream."""
        kind = LayerNorm if self.architecture.norm == "layer" else RMSNorm
        return kind(self.config.hidden_size, eps=self.config.norm_epsilon, group=self.token_group)

    def learned_positions(self) -> LearnedPositions | None:
        """What adds positions to the embedding; None where attention knows them."""
        if self.architecture.positions != "learned":
            return None
        config = self.config
        return LearnedPositions(config.max_sequence_length, config.hidden_size, group=self.token_group, init=self.init)

    def attention(self) -> SelfAttention:
        """A block's attention."""
        config, architecture = self.config, self.architecture
        rotary = None
        if architecture.positions == "rotary":
            rotary = RotaryPositions(config.head_size, theta=config.rope_theta, scaling=config.rope_scaling)
        # A rank sees its own heads only, with and without sequence parallelism.
        norm = partial(RMSNorm, config.head_size, eps=config.norm_epsilon, group=self.group)
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            num_key_value_heads=config.key_value_heads,
            head_size=config.head_size,
            parallel=self.parallel,
            group=self.group,
            bias=architecture.has_biases,
            dropout=config.dropout,
            init=self.init,
            output_init=self.output_init,
            positions=rotary,
            query_key_norm=norm if architecture.has_query_key_norm else None,
        )

    def mlp(self) -> GeluMLP | SwigluMLP:
        """A block's feed-forward layer."""
        kind = GeluMLP if self.architecture.feed_forward == "gelu" else SwigluMLP
        return kind(
            self.config.hidden_size,
            self.config.ffn_hidden_size,
            parallel=self.parallel,
            group=self.group,
            init=self.init,
            output_init=self.output_init,
        )

    def experts(self) -> MixtureOfExperts:
        """A block's experts, in the place of its feed-forward layer."""
        return MixtureOfExperts(
            self.config.hidden_size,
            self.config.ffn_hidden_size,
            num_experts=self.config.num_experts,
            experts_per_token=self.config.num_experts_per_token,
            parallel=self.parallel,
            group=self.group,
            init=self.init,
            output_init=self.output_init,
        )
