"""Causal self-attention with its heads divided over the TP ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.comm.collectives import Group, size_of
from shiplap.config.model_parallel import ModelParallelConfig
from shiplap.layers.recompute import recompute
from shiplap.layers.rope import RotaryPositions
from shiplap.tensor_parallel.linear import ColumnParallelLinear, Init, RowParallelLinear
from shiplap.tensor_parallel.random import different_per_rank


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): QKV is one column-parallel product, the output is row-parallel.

    The fused QKV weight `[(heads + 2 kv_heads) d, H]` is laid out by key-value head: the query heads that share it,
    then its key, then its value. So a plain split along dim 0 gives every rank whole groups. With as many key-value
    heads as query heads it is multi-head attention.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int,
        head_size: int,
        parallel: ModelParallelConfig,
        group: Group,
        bias: bool,
        dropout: float,
        init: Init,
        output_init: Init,
        recompute_core: bool,
        positions: RotaryPositions | None = None,
        query_key_norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Make this rank's heads.

        Args:
            hidden_size: H.
            num_heads: query heads of the full model; the TP size divides them.
            num_key_value_heads: key-value heads of the full model; the TP size divides them.
            head_size: d.
            parallel: topology and switches.
            group: the TP ranks.
            bias: whether the two linear layers have one.
            dropout: probability, on the attention weights.
            init: initial QKV weight.
            output_init: initial weight of the output projection.
            recompute_core: compute the attention weights again in backward instead of keeping what they need.
            positions: turns queries and keys by their position, if it is not in the input already.
            query_key_norm: makes a norm over d, one for queries and one for keys (Qwen3).
        """
        super().__init__()
        self.num_local_groups = num_key_value_heads // size_of(group)
        self.queries_per_group = num_heads // num_key_value_heads
        self.head_size = head_size
        self.group = group
        self.dropout = dropout
        self.recompute_core = recompute_core
        self.positions = positions
        self.query_norm = query_key_norm() if query_key_norm else None
        self.key_norm = query_key_norm() if query_key_norm else None
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (num_heads + 2 * num_key_value_heads) * head_size,
            bias,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_qkv,
            init=init,
        )
        self.proj = RowParallelLinear(
            num_heads * head_size, hidden_size, bias, config=parallel, group=group, init=output_init
        )

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
        """`[S, B, (heads + 2 kv_heads) d / R]` to `[S, B, heads d / R]`."""
        sequence, batch, _ = qkv_SBh.shape
        grouped = qkv_SBh.view(sequence, batch, self.num_local_groups, self.queries_per_group + 2, self.head_size)
        queries, key, value = grouped.split([self.queries_per_group, 1, 1], dim=3)
        # [S, B, groups, heads of the group, d] to [B, heads, S, d]
        query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (queries, key, value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        if self.positions is not None:
            query, key = self.positions(query, key)
        context = self._attend(query, key, value)
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, heads, S, d]` and twice `[B, kv_heads, S, d]` to `[B, heads, S, d]`."""
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=self.queries_per_group > 1)
        if self.dropout == 0.0 or not self.training:
            return attend(query, key, value)
        with different_per_rank(self.group, query.device):
            return attend(query, key, value, dropout_p=self.dropout)
