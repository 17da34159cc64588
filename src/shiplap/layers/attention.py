"""Causal self-attention with its heads divided over the TP ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.collectives import Group
from shiplap.layers.cache import KeyValueCache
from shiplap.layers.positions import RotaryPositions
from shiplap.layers.recompute import recompute
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.tensor_parallel.parameters import ByName, Init
from shiplap.tensor_parallel.placement import TP, Block, Split, along_tp
from shiplap.tensor_parallel.random import different_per_rank


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): QKV is one column-parallel product, the output is row-parallel.

    The fused QKV weight `[(heads + 2 kv_heads) d, H]` holds all queries, then all keys, then all values, each divided
    by itself. A rank has its even share of the query heads, and the key-value heads that these need. Where the TP size
    does not divide the number of key-value heads, ranks share some, and the gradients of these are summed.

    Attributes:
        recompute_core: compute the attention weights again in backward instead of keeping what they need.
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
        init: Init | ByName,
        output_init: Init | ByName,
        positions: RotaryPositions | None = None,
        query_key_norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Make this rank's heads.

        Args:
            hidden_size: H.
            num_heads: query heads of the full model; the TP size divides them.
            num_key_value_heads: key-value heads of the full model; a divisor of `num_heads`.
            head_size: d.
            parallel: topology and switches.
            group: the TP ranks.
            bias: whether the two linear layers have one.
            dropout: probability, on the attention weights.
            init: initial QKV weight.
            output_init: initial weight of the output projection.
            positions: turns queries and keys by their position, if it is not in the input already.
            query_key_norm: makes a norm over d, one for queries and one for keys (Qwen3).
        """
        super().__init__()
        place = along_tp(group)[TP]
        queries = Block(size=num_heads * head_size, unit=head_size)
        keys = Block(size=num_key_value_heads * head_size, unit=head_size)
        out_features = queries.size + 2 * keys.size
        self.head_size = head_size
        self.key_value_head_of = _key_value_head_of_each_query(
            queries.range_of(place),
            keys.range_of(place),
            head_size=head_size,
            queries_per_key=num_heads // num_key_value_heads,
        )
        self.num_local_key_value_heads = self.key_value_head_of[-1] + 1
        self.group = group
        self.dropout = dropout
        self.recompute_core = False
        self.positions = positions
        self.query_norm = query_key_norm() if query_key_norm else None
        self.key_norm = query_key_norm() if query_key_norm else None
        self.qkv = ColumnParallelLinear(
            hidden_size,
            out_features,
            bias,
            config=parallel,
            group=group,
            disable_tp_comm_pipeline=parallel.tp_comm_overlap_disable_qkv,
            split=Split(blocks=(queries, keys, keys)),
            init=init,
        )
        self.proj = RowParallelLinear(
            num_heads * head_size, hidden_size, bias, config=parallel, group=group, init=output_init
        )

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """`[S/R, B, H]` to `[S/R, B, H]` (without sequence parallelism `[S, B, H]`).

        Args:
            x: the tokens.
            cache: keys and values of the tokens before them, to which theirs are added.
        """
        qkv_SBh = self.qkv(x)
        if self.recompute_core and torch.is_grad_enabled():
            context_SBh = recompute(self._core, qkv_SBh)
        else:
            context_SBh = self._core(qkv_SBh, cache)
        y: Tensor = self.proj(context_SBh)
        return y

    def _core(self, qkv_SBh: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """`[S, B, (heads + 2 kv_heads) d]`, this rank's heads, to `[S, B, heads d]`."""
        sequence, batch, _ = qkv_SBh.shape
        num_keys = self.num_local_key_value_heads
        heads = qkv_SBh.view(sequence, batch, -1, self.head_size).permute(1, 2, 0, 3)  # [B, heads, S, d]
        query, key, value = heads.split([len(self.key_value_head_of), num_keys, num_keys], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        start = 0 if cache is None else cache.length
        if self.positions is not None:
            query, key = self.positions(query, key, start=start)
        mask = None
        if cache is not None:
            key, value, mask = cache.extend(self, key, value)
        context = self._attend(query, key, value, mask)
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, heads, S, d]` and twice `[B, kv_heads, T, d]` to `[B, heads, S, d]`; causal, or as the mask says."""
        per_key = len(self.key_value_head_of) // self.num_local_key_value_heads
        if self.key_value_head_of != [query // per_key for query in range(len(self.key_value_head_of))]:
            # Unevenly shared: PyTorch's attention knows only keys that serve equally many queries.
            key, value = key[:, self.key_value_head_of], value[:, self.key_value_head_of]
            per_key = 1
        # A single token sees everything. Neither mask nor causal, it runs in the fast kernels that know no masks.
        is_causal = mask is None and query.shape[2] > 1
        attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, enable_gqa=per_key > 1)
        if self.dropout == 0.0 or not self.training:
            return attend(query, key, value)
        with different_per_rank(self.group, query.device):
            return attend(query, key, value, dropout_p=self.dropout)


def _key_value_head_of_each_query(
    query_rows: range, key_rows: range, *, head_size: int, queries_per_key: int
) -> list[int]:
    """For each of this rank's query heads the key-value head that it reads, both counted on this rank."""
    first_query, first_key = query_rows.start // head_size, key_rows.start // head_size
    return [(first_query + query) // queries_per_key - first_key for query in range(len(query_rows) // head_size)]
