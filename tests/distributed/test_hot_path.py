"""How many files of ours one parallel layer passes through, forward and backward: a reader follows them all."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shiplap
from shiplap import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, destroy_all_env, init_all_env
from tests.distributed.ranks import RankPool

SOURCE = Path(shiplap.__file__).parent


def files_of(kind: str, *, overlap: bool) -> set[str]:
    """Of a layer's forward and backward, every file of ours with a function that runs."""
    parallel = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=overlap)
    init_all_env(parallel, device="cpu")
    layer = (ColumnParallelLinear if kind == "column" else RowParallelLinear)(16, 8)
    x = torch.randn(4 if kind == "column" else 8, 2, layer.weight.shape[1], requires_grad=True)
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            found.add(str(path.relative_to(SOURCE)))

    sys.setprofile(note)
    try:
        y = layer(x)
        y.backward(torch.ones_like(y))
    finally:
        sys.setprofile(None)
    assert layer.weight.grad is not None
    destroy_all_env()
    return found


def path_of(kind: str) -> tuple[set[str], set[str]]:
    """Without overlap and with it: Column's ring, Row's messages and ring."""
    return files_of(kind, overlap=False), files_of(kind, overlap=True)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_passes_through_few_files(ranks: Callable[[int], RankPool], kind: str) -> None:
    for sequential, overlapped in ranks(2).run(path_of, kind):
        for files, method in ((sequential, "overlap/whole.py"), (overlapped, "overlap/by_shard.py")):
            assert {"tensor_parallel/linear.py", "tensor_parallel/function.py", "dist/collectives.py", method} <= files
            assert len(files) <= 9, sorted(files)
