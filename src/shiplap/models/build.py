"""What a model is built from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

from torch import nn

from shiplap.config.model import TransformerConfig
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.layers.attention import SelfAttention
from shiplap.layers.mlp import GeluMLP, SwigluMLP
from shiplap.layers.moe import MixtureOfExperts
from shiplap.layers.positions import RotaryPositions
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
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        stage: the part to build; None: the whole model.
    """

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

    def attention(
        self,
        *,
        bias: bool,
        positions: RotaryPositions | None = None,
        query_key_norm: Callable[[], nn.Module] | None = None,
    ) -> SelfAttention:
        """A block's attention; what families differ in are arguments, those of `SelfAttention`."""
        return SelfAttention(
            self.config.hidden_size,
            self.config.num_attention_heads,
            num_key_value_heads=self.config.key_value_heads,
            head_size=self.config.head_size,
            parallel=self.parallel,
            group=self.group,
            bias=bias,
            dropout=self.config.dropout,
            init=self.init,
            output_init=self.output_init,
            positions=positions,
            query_key_norm=query_key_norm,
        )

    def mlp(self, kind: type[GeluMLP] | type[SwigluMLP]) -> GeluMLP | SwigluMLP:
        """A block's feed-forward layer, of the given kind."""
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
