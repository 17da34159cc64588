"""`shiplap bench` over NCCL: parts, DTensor beside them, and the whole command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import test_bench
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, backend="cpu:gloo,cuda:nccl")
    yield pool
    pool.stop()


def test_a_part_computes_the_same_under_every_plan(pair: RankPool) -> None:
    assert pair.run(test_bench.each_plan_computes_the_same, "cuda") == [[], []]


def test_products_alone_communicate_nothing(pair: RankPool) -> None:
    assert pair.run(test_bench.alone, "cuda") == [16, 16]


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_dtensor_computes_the_same(pair: RankPool, dtype: str, close: float) -> None:
    found = pair.run(test_bench.dtensor, "cuda", dtype)[0]
    for title in ("mixtral experts", "mixtral block"):
        assert found.pop(title) == "has no simple counterpart of experts"
    for title, (off, counts) in found.items():
        assert off < close, title
        assert counts["all_gather"] == (3 if title == "llama3 block" else 2) * (2 if "block" in title else 1), title


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_is_measured(pair: RankPool, tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "bench"
    arguments = f"bench gpt2 {test_bench.BENCH} --ffn-hidden-size 64 --device cuda --dtype {dtype}"
    (code, out, err), other = pair.run(test_bench.once_each, f"{arguments} --tp-comm-overlap --bench-dir {folder}")
    assert code == 0, err
    assert other[:2] == (0, "")
    assert out.endswith(f"\nbench folder: {folder}\n")
    records = test_bench.records_of(folder)
    assert {record["device"] for record in records} == {"cuda"}
    assert {"DTensor", "products", "sequential"} <= {
        record["variant"] for record in records if record["why_not"] is None
    }
