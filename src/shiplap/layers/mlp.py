"""The feed-forward layer with its width divided over the TP ranks."""

import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.parameters import ByName, Init
from shiplap.tensor_parallel.placement import Block, Split


class SwigluMLP(nn.Module):
    """`fc2(silu(gate) · up)`, gate and up being one product FC1 (Shazeer 2020).

    The full FC1 weight is `[2F, H]`, gate above up, each divided by itself: a rank's product is `[gate | up]`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        parallel: ModelParallelConfig,
        group: Group,
        init: Init | ByName,
        output_init: Init | ByName,
    ) -> None:
        """Make this rank's part; the arguments are those of `GeluMLP`."""
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            hidden_size,
            2 * ffn_hidden_size,
            False,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_fc1,
            split=Split(blocks=2 * (Block(size=ffn_hidden_size),)),
            init=init,
        )
        self.fc2 = RowParallelLinear(
            ffn_hidden_size, hidden_size, False, config=parallel, group=group, init=output_init
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`)."""
        gate, up = self.fc1(x).chunk(2, dim=-1)
        y: Tensor = self.fc2(F.silu(gate) * up)
        return y


class GeluMLP(nn.Module):
    """`fc2(gelu(fc1(x)))`, with GELU in the tanh form that GPT-2 uses (Hendrycks and Gimpel 2016)."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        parallel: ModelParallelConfig,
        group: Group,
        init: Init | ByName,
        output_init: Init | ByName,
    ) -> None:
        """Make this rank's part.

        Args:
            hidden_size: H.
            ffn_hidden_size: F of the full model; the TP size divides it.
            parallel: topology and switches.
            group: the TP ranks.
            init: initial weight of FC1.
            output_init: initial weight of FC2.
        """
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            hidden_size,
            ffn_hidden_size,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_fc1,
            init=init,
        )
        self.fc2 = RowParallelLinear(ffn_hidden_size, hidden_size, config=parallel, group=group, init=output_init)

    def forward(self, x: Tensor) -> Tensor:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`)."""
        y: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return y
