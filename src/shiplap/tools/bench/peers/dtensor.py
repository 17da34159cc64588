"""PyTorch's own: DTensor with ColwiseParallel, RowwiseParallel and SequenceParallel, as torchtitan uses them.

Activations are divided along the sequence, dim 0, which gathers without rearranging. One gather serves queries, keys
and values, or gate and up, each a product of its own; the gathered input is kept for backward, so that nothing is
gathered again. As here, communication is in the dtype of the computation, and parameters are in float32 under autocast.
Attention itself, rotary positions and the norms of queries and keys are ours, on this rank's heads.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - a peer brings its own communication
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: TID251
from torch.distributed.tensor.parallel import (  # noqa: TID251
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shiplap.layers.attention import SelfAttention
from shiplap.layers.mlp import GeluMLP, SwigluMLP
from shiplap.layers.norm import LayerNorm, RMSNorm
from shiplap.layers.recompute import recompute
from shiplap.models.block import DecoderBlock
from shiplap.tensor_parallel.gemm import cast_for_autocast
from shiplap.tensor_parallel.placement import TP
from shiplap.tensor_parallel.random import different_per_rank
from shiplap.tools.bench.peers.peer import Copied
from shiplap.tuning.alone import sharing
from shiplap.tuning.parts import Part


class DTensorPeer:
    """See the module."""

    title = "DTensor"

    def why_not(self, part: Part) -> str | None:
        """Experts, adapters, and key-value heads that ranks would have to share."""
        if any(layer.experts is not None for layer in part.layers.values()):
            return "has no simple counterpart of experts"
        if any(layer.adapter is not None for layer in part.layers.values()):
            return "no adapters in this comparison"
        size = part.env.layout.size("tp")
        for layer in part.layers.values():
            if layer.module.placements["weight"].splits[TP].is_shared(size):
                return f"cannot share key-value heads, which TP {size} does not divide"
        return None

    def step(self, part: Part) -> "_Step":
        """The same part, made of DTensors."""
        return _Step(part)


class _Step:
    """A part made of DTensors."""

    def __init__(self, part: Part) -> None:
        mesh = part.env.mesh
        assert mesh is not None
        self._part = part
        self._making = _Making(mesh["tp"])
        self.module = self._making.part(part.module)
        self.copies: Sequence[Copied] = self._making.copies

    def __call__(self) -> tuple[Tensor, Sequence[Tensor]]:
        return self._part.run(self.module, _complete)


def _complete(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sum what is a part on each rank, norms' gradients, as the next to use them would. Ours leave complete."""
    return [
        gradient.redistribute(placements=[Replicate()])
        if isinstance(gradient, DTensor) and any(isinstance(place, Partial) for place in gradient.placements)
        else gradient
        for gradient in gradients
    ]


class _Making:
    """Makes parts of DTensors from ours, and remembers which parameter came from where."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.copies: list[Copied] = []

    def part(self, ours: nn.Module) -> nn.Module:
        if isinstance(ours, SelfAttention):
            return _Attention(ours, self)
        if isinstance(ours, GeluMLP | SwigluMLP):
            return _MLP(ours, self)
        assert isinstance(ours, DecoderBlock)
        block = DecoderBlock(
            attention_norm=_Norm(ours.attention_norm, self),
            attention=_Attention(ours.attention, self),
            mlp_norm=_Norm(ours.mlp_norm, self),
            mlp=_MLP(ours.mlp, self),
            dropout=sharing(ours.dropout),
        )
        block.recompute_all = ours.recompute_all
        return block

    def column(self, weight: nn.Parameter, bias: nn.Parameter | None, rows: slice = slice(None)) -> nn.Module:
        """A column-parallel product with these rows of this rank's weight."""
        num_rows = weight[rows].shape[0] * self._mesh.size()
        full = nn.Linear(weight.shape[1], num_rows, bias is not None, device="meta")
        return self._filled(full, ColwiseParallel(), {"weight": weight, "bias": bias}, rows)

    def row(self, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
        """A row-parallel product, whose output is divided along the sequence."""
        full = nn.Linear(weight.shape[1] * self._mesh.size(), weight.shape[0], bias is not None, device="meta")
        style = RowwiseParallel(output_layouts=Shard(0))
        return self._filled(full, style, {"weight": weight, "bias": bias})

    def norm(self, ours: LayerNorm | RMSNorm) -> nn.Module:
        """A norm of this rank's tokens."""
        size = tuple(ours.weight.shape)
        full: nn.Module
        if isinstance(ours, LayerNorm):
            full = nn.LayerNorm(size, eps=ours.eps, device="meta")
        else:
            full = nn.RMSNorm(size, eps=ours.eps, device="meta")
        style = SequenceParallel(sequence_dim=0, use_local_output=True)
        return self._filled(full, style, dict(ours.named_parameters()))

    def gathered(self, x: Tensor) -> Tensor:
        """What `PrepareModuleInput` does: the whole sequence on every rank."""
        return DTensor.from_local(x, self._mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])

    def _filled(
        self,
        module: nn.Module,
        style: ParallelStyle,
        ours: dict[str, nn.Parameter | None] | dict[str, nn.Parameter],
        rows: slice = slice(None),
    ) -> nn.Module:
        """On the device, with our weights. Without memory until it is divided: the whole of it may not fit."""
        parallel: nn.Module = parallelize_module(module, self._mesh, style)
        first = ours["weight"]
        assert first is not None
        parallel.to_empty(device=str(first.device))
        for name, theirs in parallel.named_parameters():
            from_ours = ours[name]
            assert from_ours is not None
            assert isinstance(theirs.data, DTensor)
            theirs.data.to_local().copy_(from_ours.detach()[rows])
            theirs.requires_grad_(from_ours.requires_grad)
            self.copies.append(Copied(ours=from_ours, theirs=theirs, rows=rows))
        return parallel


class _Norm(nn.Module):
    """A norm, and the cast that the next product would do: before the gather, so that half as much is gathered."""

    def __init__(self, ours: nn.Module, making: _Making) -> None:
        super().__init__()
        assert isinstance(ours, LayerNorm | RMSNorm)
        self.norm = making.norm(ours)

    def forward(self, x: Tensor) -> Tensor:
        return cast_for_autocast(self.norm(x))


class _Attention(nn.Module):
    """Queries, keys and values each by a product of its own, from one gather."""

    def __init__(self, ours: nn.Module, making: _Making) -> None:
        super().__init__()
        assert isinstance(ours, SelfAttention)
        self._gathered = making.gathered
        size, num_keys = ours.head_size, ours.num_local_key_value_heads
        num_queries = len(ours.key_value_head_of)
        ends = [size * heads for heads in (0, num_queries, num_queries + num_keys, num_queries + 2 * num_keys)]
        qkv, proj = ours.qkv, ours.proj
        self.query, self.key, self.value = (
            making.column(qkv.weight, qkv.bias, slice(start, end)) for start, end in pairwise(ends)
        )
        self.proj = making.row(proj.weight, proj.bias)
        self.positions, self.query_norm, self.key_norm = (
            None if module is None else sharing(module) for module in (ours.positions, ours.query_norm, ours.key_norm)
        )
        self._ours = [ours]  # in a list, so that its parameters are not this module's

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        whole = self._gathered(x)
        heads = self.query(whole), self.key(whole), self.value(whole)
        if self._ours[0].recompute_core and torch.is_grad_enabled():
            context = recompute(self._core, *heads)
        else:
            context = self._core(*heads)
        y: Tensor = self.proj(context)
        return y

    def _core(self, *features: Tensor) -> Tensor:
        """`[S, B, heads d]` of this rank's heads, as `SelfAttention` does it."""
        ours = self._ours[0]
        query, key, value = (x.unflatten(-1, (-1, ours.head_size)).permute(1, 2, 0, 3) for x in features)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        if self.positions is not None:
            query, key = self.positions(query, key)
        is_grouped = query.shape[1] != key.shape[1]
        dropout = ours.dropout if self.training else 0.0
        with different_per_rank(ours.group if dropout else None, query.device):
            context = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped
            )
        return context.permute(2, 0, 1, 3).flatten(2)


class _MLP(nn.Module):
    """FC1, or gate and up from one gather; and FC2."""

    def __init__(self, ours: nn.Module, making: _Making) -> None:
        super().__init__()
        assert isinstance(ours, GeluMLP | SwigluMLP)
        self._gathered = making.gathered
        fc1, fc2 = ours.fc1, ours.fc2
        num_rows = fc1.weight.shape[0]
        self.gate: nn.Module | None = None
        if isinstance(ours, SwigluMLP):
            self.gate = making.column(fc1.weight, fc1.bias, slice(num_rows // 2))
            self.fc1 = making.column(fc1.weight, fc1.bias, slice(num_rows // 2, num_rows))
        else:
            self.fc1 = making.column(fc1.weight, fc1.bias)
        self.fc2 = making.row(fc2.weight, fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        whole = self._gathered(x)
        if self.gate is None:
            inner = F.gelu(self.fc1(whole), approximate="tanh")
        else:
            inner = F.silu(self.gate(whole)) * self.fc1(whole)
        y: Tensor = self.fc2(inner)
        return y
