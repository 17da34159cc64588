"""Causal self-attention with its heads divided over the TP ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group, size_of
from shiplap.config.model_parallel import ModelParallelConfig
from shiplap.layers.recompute import recompute
from shiplap.tensor_parallel.linear import ColumnParallelLinear, Init, RowParallelLinear
from shiplap.tensor_parallel.random import different_per_rank


class SelfAttention(nn.Module):
    """Multi-head attention: QKV is one column-parallel product, the output projection is row-parallel.

    The fused QKV weight `[3H, H]` is laid out head by head: each head's query, key and value rows stand together, so a
    plain split along dim 0 gives every rank whole heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        parallel: ModelParallelConfig,
        group: Group,
        dropout: float,
        init: Init,
        output_init: Init,
        recompute_core: bool,
    ) -> None:
        """Make this rank's heads.

        Args:
            hidden_size: H.
            num_heads: heads of the full model; the TP size divides them.
            parallel: topology and switches.
            group: the TP ranks.
            dropout: probability, on the attention weights.
            init: initial QKV weight.
            output_init: initial weight of the output projection.
            recompute_core: compute the attention weights again in backward instead of keeping what they need.
        """
        super().__init__()
        self.num_local_heads = num_heads // size_of(group)
        self.group = group
        self.dropout = dropout
        self.recompute_core = recompute_core
        self.qkv = ColumnParallelLinear(
            hidden_size,
            3 * hidden_size,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_qkv,
            init=init,
        )
        self.proj = RowParallelLinear(hidden_size, hidden_size, config=parallel, group=group, init=output_init)

    def forward(self, x: Tensor) -> Tensor:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`)."""
        qkv_SBh = self.qkv(x)
        if self.recompute_core and torch.is_grad_enabled():
            context_SBh = recompute(self._core, qkv_SBh)
        else:
            context_SBh = self._core(qkv_SBh)
        y: Tensor = self.proj(context_SBh)
        return y

    def _core(self, qkv_SBh: Tensor) -> Tensor:
        """`[S, B, 3H/R]` to `[S, B, H/R]`."""
        sequence, batch, _ = qkv_SBh.shape
        # [S, B, heads, 3, d] to three of [B, heads, S, d]
        heads = qkv_SBh.view(sequence, batch, self.num_local_heads, 3, -1)
        query, key, value = heads.permute(3, 1, 2, 0, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        if dropout == 0.0:
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            with different_per_rank(self.group, qkv_SBh.device):
                context = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
