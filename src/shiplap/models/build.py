"""What a model is built from."""

from dataclasses import dataclass
from functools import partial
from math import sqrt

from torch import nn

from shiplap.comm.collectives import Group
from shiplap.config.model import TransformerConfig
from shiplap.config.model_parallel import ModelParallelConfig
from shiplap.tensor_parallel.linear import Init


@dataclass(frozen=True, kw_only=True)
class Build:
    """Sizes, topology, and what follows from them for the parts.

    Attributes:
        config: sizes of the full model.
        parallel: topology and switches.
        group: the TP ranks.
        recompute: `none`, `selective` (the attention core) or `full` (whole blocks).
    """

    config: TransformerConfig
    parallel: ModelParallelConfig
    group: Group
    recompute: str = "none"

    @property
    def token_group(self) -> Group:
        """The ranks that hold other tokens than this one between the parallel layers; None if there are none."""
        return self.group if self.parallel.sequence_parallel else None

    @property
    def init(self) -> Init:
        """Draws initial weights."""
        return partial(nn.init.normal_, std=self.config.initializer_range)

    @property
    def output_init(self) -> Init:
        """Draws weights of projections into the residual stream: smaller, by the number of them.

        Radford et al. 2019, section 2.3.
        """
        return partial(nn.init.normal_, std=self.config.initializer_range / sqrt(2 * self.config.num_layers))
