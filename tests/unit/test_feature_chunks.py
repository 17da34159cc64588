"""Some features of a GEMM at a time: where it is cut, and that the chunks make up the whole."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shiplap.overlap.by_features import feature_chunks
from shiplap.overlap.registry import method
from shiplap.tensor_parallel import gemm
from tests.cases import feature_chunks as cases


@pytest.mark.parametrize(
    ("width", "numbers", "ends"),
    [
        (512, (4,), [128, 256, 384, 512]),
        (512, (1,), [512]),
        (512, (1, 2, 2, 3), [64, 192, 320, 512]),
        # Whole multiples of 64, the last chunk with what is left.
        (300, (2,), [128, 300]),
        (300, (4,), [64, 128, 192, 300]),
        # Too few features for that: multiples of 8, and fewer chunks if need be.
        (48, (4,), [8, 24, 32, 48]),
        (57, (2,), [24, 57]),
        (20, (100,), [8, 20]),
        (7, (4,), [7]),
        (64, (3, 0, 1), [48, 64]),
        (64, (1, 0), [64]),
    ],
)
def test_where_it_is_cut(width: int, numbers: tuple[int, ...], ends: list[int]) -> None:
    chunks = feature_chunks(width, numbers)
    assert [chunk.stop for chunk in chunks] == ends
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]]


@pytest.mark.parametrize("numbers", [(1,), (4,), (8,), (1, 2, 2, 3), (3, 2, 2, 1), (0, 1, 0)])
def test_chunks_cover_every_feature_once(numbers: tuple[int, ...]) -> None:
    for width in range(1, 700):
        chunks = feature_chunks(width, numbers)
        assert (chunks[0].start, chunks[-1].stop) == (0, width)
        assert all(chunk.start < chunk.stop for chunk in chunks)
        assert all(before.stop == after.start and before.stop % 8 == 0 for before, after in pairwise(chunks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", cases.OF_INPUTS)
def test_inputs_add_up_to_the_output_and_make_up_their_gradient(kind: cases.Kind, dtype: torch.dtype) -> None:
    cases.check_inputs(kind, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", cases.OF_OUTPUTS)
def test_outputs_make_up_the_output_and_their_gradients_add_up(kind: cases.Kind, dtype: torch.dtype) -> None:
    cases.check_outputs(kind, dtype, "cpu")


def test_sums_of_bfloat16_products_are_not_rounded_between() -> None:
    """Rounded after every chunk, 64 of them would be off by several units in the last place."""
    torch.manual_seed(0)
    x, weight = torch.randn(32, 512).bfloat16(), torch.randn(16, 512).bfloat16()
    exact = x.double() @ weight.double().t()
    total, rounded = torch.empty(32, 16), torch.zeros(32, 16, dtype=torch.bfloat16)
    for start in range(0, 512, 8):
        some = slice(start, start + 8)
        gemm.linear_forward(x[:, some], weight[:, some], None, out=total, add=start > 0)
        gemm.linear_forward(x[:, some], weight[:, some], None, out=rounded, add=True)

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    # The CPU rounds each product, which are independent errors; a sum in bfloat16 is rounded as often, at its size.
    assert error(total.bfloat16()) < 2.0**-8
    assert error(rounded) > 2 * error(total.bfloat16())


def test_a_bias_is_added_in_the_dtype_of_the_sum() -> None:
    x, weight = torch.zeros(3, 8).bfloat16(), torch.zeros(2, 8).bfloat16()
    out = torch.empty(3, 2)
    gemm.linear_forward(x, weight, torch.tensor([1.0, -2.0]).bfloat16(), out=out)
    assert out.tolist() == [[1.0, -2.0]] * 3


@pytest.mark.parametrize("name", ["feature_chunks:0", "feature_chunks:0,0 own_first", "ring:0", "feature_chunks:-1,2"])
def test_numbers_that_divide_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs numbers from 0 on, not all of them 0, got "):
        method(name)
