"""Rows of several shards at once: how they are divided into chunks, and that their GEMM copies nothing."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shiplap.overlap.by_rows import ROW_CHUNKS, chunk_bounds, produce_and_scatter
from shiplap.overlap.primitives import Region, ShardRows, take
from shiplap.tensor_parallel import gemm


@pytest.mark.parametrize(
    ("num_rows", "sizes", "expected"),
    [
        (8, (2, 1, 1), [(0, 4), (4, 6), (6, 8)]),
        (8, (1, 1), [(0, 4), (4, 8)]),
        (7, (1, 1), [(0, 3), (3, 7)]),
        (10, (2, 1, 1), [(0, 5), (5, 7), (7, 10)]),
        (9, (1,), [(0, 9)]),
        (6, (5, 2, 0, 9), [(0, 1), (1, 2), (2, 6)]),
        (2, (2, 1, 1), [(0, 1), (1, 2)]),
        (1, (2, 1, 1), [(0, 1)]),
        (1, (1, 1, 1, 1), [(0, 1)]),
        (0, (2, 1, 1), []),
        (12, (0, 1), [(0, 12)]),
        (12, (1, 0), [(0, 12)]),
    ],
)
def test_where_chunks_begin_and_end(num_rows: int, sizes: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert chunk_bounds(num_rows, sizes) == expected


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 1, 1), (1, 1, 2, 4), (5, 2, 0, 9), (1, 1000), (1000, 1)])
def test_chunks_cover_every_row_once(sizes: tuple[int, ...]) -> None:
    for num_rows in range(1, 70):
        bounds = chunk_bounds(num_rows, sizes)
        assert all(start < stop for start, stop in bounds)
        assert (bounds[0][0], bounds[-1][1]) == (0, num_rows)
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert len(bounds) <= sum(size > 0 for size in sizes)
        # Each is as large as it should be, but for the row that is cut.
        share = {stop - start for start, stop in bounds}
        assert max(share) <= num_rows * max(sizes) / sum(sizes) + 1


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_rows_are_taken_without_a_copy(dims: tuple[int, ...]) -> None:
    x = numbered(12, *dims)
    for rows in (slice(2, 9), ShardRows(3, 1, 3), ShardRows(4, 0, 3), ShardRows(1, 5, 7)):
        taken = take(x, rows)
        assert taken.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if isinstance(rows, ShardRows):
            per_shard = 12 // rows.num_shards
            shards = [
                x[shard * per_shard + rows.start : shard * per_shard + rows.stop] for shard in range(rows.num_shards)
            ]
            assert torch.equal(taken, torch.stack(shards))
        else:
            assert torch.equal(taken, x[2:9])


class Calls(TorchDispatchMode):
    """Everything that runs inside: its name, its tensors, and the bytes that it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inputs: list[list[Tensor]] = []
        self.bytes_made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x for x in args if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        written = [x for x in (kwargs or {}).values() if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in (*given, *written)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.bytes_made += result.untyped_storage().nbytes()
        self.names.append(func.overloadpacket.__name__)
        self.inputs.append(given)
        return result

    def of(self, *names: str) -> list[list[Tensor]]:
        return [given for name, given in zip(self.names, self.inputs, strict=True) if name in names]


@pytest.mark.parametrize("dims", [(), (3,), (3, 2)], ids=["no batch", "batch", "slots"])
@pytest.mark.parametrize("product", ["y", "y + b", "dx"])
@pytest.mark.parametrize("rows", [ShardRows(4, 1, 4), ShardRows(4, 0, 3), ShardRows(2, 3, 5)], ids=str)
def test_strided_rows_are_multiplied_as_a_batch_without_a_copy(
    dims: tuple[int, ...], product: str, *, rows: ShardRows
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((16, *dims, 5), (7, 5), (7,)))
    transposed = weight.t().contiguous()
    part = take(x, rows)
    out = torch.full((*part.shape[:-1], 7), torch.nan)
    with Calls() as calls:
        if product == "dx":
            gemm.linear_dgrad(part, transposed, out=out)
        else:
            gemm.linear_forward(part, weight, bias if product == "y + b" else None, out=out)
    torch.testing.assert_close(out, F.linear(part, weight, bias if product == "y + b" else None))
    assert calls.bytes_made == 0
    assert not calls.of("mm", "addmm", "clone", "copy_")
    ((*_, batch, matrices),) = calls.of("baddbmm" if product == "y + b" else "bmm")
    assert batch.data_ptr() == part.data_ptr()
    assert matrices.data_ptr() == (transposed if product == "dx" else weight).data_ptr()
    assert matrices.stride(0) == 0, "the weight is not repeated"


def test_some_columns_of_strided_rows_are_not_copied_either() -> None:
    """A layer with an adapter multiplies its own columns of x."""
    x, weight, out = torch.randn(8, 3, 9), torch.randn(7, 5), torch.empty(2, 2, 3, 7)
    part = take(x, ShardRows(2, 1, 3))[..., :5]
    with Calls() as calls:
        gemm.linear_forward(part, weight, None, out=out)
    torch.testing.assert_close(out, part @ weight.t())
    assert len(calls.of("bmm")) == 1
    assert calls.bytes_made == 0


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (2, 6, 3, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_that_lie_together_are_multiplied_as_one_matrix(shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(7, 5), torch.randn(7)
    out = torch.empty(*shape[:-1], 7)
    with Calls() as calls:
        gemm.linear_forward(x, weight, bias if has_bias else None, out=out)
    torch.testing.assert_close(out, F.linear(x, weight, bias if has_bias else None))
    assert len(calls.of("addmm" if has_bias else "mm")) == 1
    assert not calls.of("bmm", "baddbmm", "clone", "copy_")
    assert calls.bytes_made == 0


def test_all_rows_of_all_shards_are_one_matrix_again() -> None:
    x, weight, out = torch.randn(8, 3, 5), torch.randn(7, 5), torch.empty(2, 4, 3, 7)
    with Calls() as calls:
        gemm.linear_forward(take(x, ShardRows(2, 0, 4)), weight, None, out=out)
    assert len(calls.of("mm")) == 1
    assert calls.bytes_made == 0


@pytest.mark.parametrize("numbers", [(2, 1, 1), (1, 1), (1,), (5, 2, 0, 9)])
def test_without_other_ranks_chunks_are_the_whole(numbers: tuple[int, ...]) -> None:
    x, weight = torch.randn(10, 3, 5), torch.randn(7, 5)
    sizes: list[int] = []

    def produce(rows: Region, out: Tensor) -> None:
        assert isinstance(rows, ShardRows)
        sizes.append(out.shape[1])
        gemm.linear_forward(take(x, rows), weight, None, out=out)

    method = ROW_CHUNKS.method(*numbers)
    y = produce_and_scatter(produce, torch.Size([10, 3, 7]), like=x, group=None, method=method).wait()
    torch.testing.assert_close(y, x @ weight.t())
    assert sizes == [stop - start for start, stop in chunk_bounds(10, numbers)]
