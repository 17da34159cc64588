"""The one-rank part of the matrix on CUDA tensors, on the default stream and on another one."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shiplap.config import ModelParallelConfig
from shiplap.parallel import Recompute
from tests.cases import feature_chunks, linear, lora, models

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(params=["default stream", "side stream"])
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    context: Any = torch.cuda.stream(torch.cuda.Stream()) if request.param == "side stream" else nullcontext()
    with context:
        yield
    torch.cuda.synchronize()


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("which", ["matrix", "modes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_every_gradient_match_float64(dtype: torch.dtype, which: str) -> None:
    cases = getattr(linear, which)(1, dtype, "cuda")
    failures = [failure for case in cases for failure in linear.check(case, None)]
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n".join(failures[:5])


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "dtype"), [(name, dtype) for name in models.CONFIGS for dtype in models.dtypes(name)]
)
def test_models_match_float64(family: str, dtype: torch.dtype, recompute: Recompute) -> None:
    failures = models.check(family, ModelParallelConfig(), None, recompute=recompute, dtype=dtype, device="cuda")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama3, 3 key-value heads"])
def test_adapters_match_float64(name: str, dtype: torch.dtype) -> None:
    failures = lora.check(name, ModelParallelConfig(), None, targets=("all-linear",), dtype=dtype, device="cuda")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_columns_at_a_time_are_the_whole_product(dtype: torch.dtype) -> None:
    for kind in feature_chunks.OF_INPUTS:
        feature_chunks.check_inputs(kind, dtype, "cuda")
    for kind in feature_chunks.OF_OUTPUTS:
        feature_chunks.check_outputs(kind, dtype, "cuda")


def test_weight_gradients_accumulate_in_float32_from_bfloat16_products() -> None:
    """A sum of many small products that bfloat16 would lose: it must arrive in float32, unrounded."""
    case = linear.Case(
        kind="column", config=ModelParallelConfig(), dtype=torch.bfloat16, mode="main_grad", device="cuda"
    )
    full = linear.reference(case)
    layer = linear.make_layer(case, full, None)
    main_grad = torch.full(layer.weight.shape, 1024.0, device="cuda")
    layer.weight.main_grad = main_grad  # type: ignore[attr-defined]
    x = full.x.to("cuda", torch.bfloat16).requires_grad_()
    layer(x).backward(full.dy.to("cuda", torch.bfloat16))
    added = main_grad.double().cpu() - 1024.0
    # 1024 in float32 has steps of 2^-13; bfloat16 around it has steps of 8.
    assert (added - full.dw).abs().max() < 2.0**-12
