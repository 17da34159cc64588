"""Every kind of GEMM, some features at a time: together they are what the whole GEMM is."""

from typing import Any, Literal

import torch
from torch import Tensor

from shiplap.tensor_parallel.experts import Assignment, FromExperts, ToExperts
from shiplap.tensor_parallel.gemm import DENSE
from shiplap.tensor_parallel.low_rank import LowRankGemm, _Part

TOKENS, BATCH, INPUTS, OUTPUTS, RANK, EXPERTS, SLOTS = 6, 2, 24, 40, 3, 4, 2
Kind = Literal["dense", "adapted", "adapted parts", "to experts", "from experts"]
OF_INPUTS: list[Kind] = ["dense", "adapted", "adapted parts", "to experts"]
OF_OUTPUTS: list[Kind] = ["dense", "adapted", "from experts"]
ALL = slice(0, TOKENS)


def make(kind: Kind, dtype: torch.dtype, device: str) -> tuple[Any, Tensor]:
    """The GEMM, and its weight."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype)

    match kind:
        case "dense":
            return DENSE, draw(OUTPUTS, INPUTS)
        case "adapted":
            whole = _Part(outputs=slice(None), up=slice(None), down=slice(0, RANK), factors=slice(None))
            return LowRankGemm(base=draw(OUTPUTS, INPUTS), parts=(whole,), num_features=RANK), draw(OUTPUTS, RANK)
        case "adapted parts":
            parts = (
                _Part(outputs=slice(0, 10), up=slice(0, 10), down=slice(0, RANK), factors=slice(None)),
                _Part(outputs=slice(20, 40), up=slice(10, 30), down=slice(RANK, 2 * RANK), factors=slice(None)),
            )
            return LowRankGemm(base=draw(OUTPUTS, INPUTS), parts=parts, num_features=2 * RANK), draw(30, RANK)
        case "to experts" | "from experts":
            experts = torch.rand(TOKENS, BATCH, EXPERTS).topk(SLOTS).indices.to(device)
            assignment = Assignment(experts=experts, num_experts=EXPERTS)
            gemm = (ToExperts if kind == "to experts" else FromExperts)(assignment=assignment)
            return gemm, draw(EXPERTS * OUTPUTS, INPUTS)


def chunks(width: int) -> list[slice]:
    """As the methods cut them; and where an adapter's h is at the end, a chunk that begins inside it."""
    ends = [8, 16, *([26] if width % 8 else []), width]
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def empty_like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Not a number yet."""
    return x.new_full(shape or x.shape, torch.nan, dtype=dtype or x.dtype)


def check_inputs(kind: Kind, dtype: torch.dtype, device: str) -> None:
    """Of a Column layer: x arrives in chunks of features, whose GEMMs add up, and dx leaves in chunks."""
    torch.manual_seed(0)
    gemm, weight = make(kind, dtype, device)
    x = torch.randn(TOKENS, BATCH, *gemm.input_dims((OUTPUTS,), weight)).to(device, dtype)
    bias = None if kind == "to experts" else torch.randn(OUTPUTS).to(device, dtype)
    whole = empty_like(x, TOKENS, *gemm.output_dims(x.shape[1:], weight))
    gemm.forward(x, weight, bias, rows=ALL, out=whole)
    dy, dx = torch.randn_like(whole), empty_like(x)
    gemm.dgrad(dy, weight, rows=ALL, out=dx)

    added = empty_like(whole, dtype=torch.float32)
    for features in chunks(x.shape[-1]):
        some, its_weight = gemm.of_inputs(weight, features)
        is_first = features.start == 0
        some.forward(x[..., features], its_weight, bias if is_first else None, rows=ALL, out=added, add=not is_first)
        out = empty_like(x, TOKENS, BATCH, features.stop - features.start)
        some.dgrad(dy, its_weight, rows=ALL, out=out)
        check(out, dx[..., features])
    check(added, whole)


def check_outputs(kind: Kind, dtype: torch.dtype, device: str) -> None:
    """Of a Row layer: y leaves in chunks of features, and dy arrives in chunks, whose gradients of x add up."""
    torch.manual_seed(0)
    gemm, weight = make(kind, dtype, device)
    dims = gemm.input_dims((OUTPUTS,), weight)
    x = torch.randn(TOKENS, BATCH, *dims).to(device, dtype)
    whole = empty_like(x, TOKENS, BATCH, OUTPUTS)
    gemm.forward(x, weight, None, rows=ALL, out=whole)
    dy, dx = torch.randn_like(whole), empty_like(x)
    gemm.dgrad(dy, weight, rows=ALL, out=dx)

    added = empty_like(x, dtype=torch.float32)
    for features in chunks(OUTPUTS):
        some, its_weight = gemm.of_outputs(weight, features)
        out = empty_like(x, TOKENS, BATCH, features.stop - features.start)
        some.forward(x, its_weight, None, rows=ALL, out=out)
        check(out, whole[..., features])
        some.dgrad(dy[..., features], its_weight, rows=ALL, out=added, add=features.start > 0)
    check(added, dx)


def check(found: Tensor, expected: Tensor) -> None:
    """Alike but for rounding."""
    close = 1e-5 if expected.dtype == torch.float32 else 2e-2
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= close, error
