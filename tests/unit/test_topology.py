"""Rank layout, and the environment of a single process."""

import pytest
import torch

from shiplap import GlobalEnv, ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.config import UserError
from shiplap.dist import RankLayout, layout_for
from tests.cases.topology import ToyConfig


def test_tp_ranks_are_neighbours_then_dp_then_pp() -> None:
    layout = RankLayout.of(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("layout", [RankLayout.of(pp=2, dp=3, tp=4), RankLayout.of(pp=1, dp=1, tp=8)])
def test_rank_and_coordinates_are_inverse(layout: RankLayout) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank
    for axis in ("pp", "dp", "tp"):
        assert sorted(rank for group in layout.groups(axis) for rank in group) == list(range(layout.world_size))


def test_data_parallelism_takes_what_is_left() -> None:
    config = ModelParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert layout_for(config, 12) == RankLayout.of(pp=2, dp=3, tp=2)
    with pytest.raises(UserError, match=r"6 ranks.* 2 × 2 = 4"):
        layout_for(config, 6)


def test_another_axis_is_one_entry() -> None:
    layout = layout_for(ToyConfig(tensor_parallel_size=2, toy_size=2), 8)
    assert layout.sizes == {"pp": 1, "dp": 2, "toy": 2, "tp": 2}
    assert layout.coordinates(5) == {"pp": 0, "dp": 1, "toy": 0, "tp": 1}
    assert layout.groups("toy") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.rank_name(6) == "rank 6 (tp 0, toy 1, dp 1, pp 0)"
    assert (
        layout.overview()
        == """\
8 ranks: TP 2 × TOY 2 × DP 2 × PP 1
  tensor parallel   [0 1] [2 3] [4 5] [6 7]
  toy parallel      [0 2] [1 3] [4 6] [5 7]
  data parallel     [0 4] [1 5] [2 6] [3 7]
  pipeline parallel [0] [1] [2] [3] [4] [5] [6] [7]"""
    )
    # Ranks that share a sequence read the same data, and hold the same weights.
    assert (layout.data_size, [layout.data_rank(rank) for rank in range(8)]) == (2, [0, 0, 0, 0, 1, 1, 1, 1])
    assert [rank for rank in range(8) if layout.is_in_first_replica(rank)] == [0, 1]


def test_the_option_of_another_axis_is_checked_like_the_others() -> None:
    with pytest.raises(UserError, match=r"--toy must be at least 1, got 0"):
        ToyConfig(toy_size=0)
    with pytest.raises(
        UserError, match=r"--tensor-parallel × --toy × --pipeline-parallel = 2 × 2 × 1 = 4\. .*TP × TOY"
    ):
        layout_for(ToyConfig(tensor_parallel_size=2, toy_size=2), 6)


def test_the_overview_names_every_group() -> None:
    overview = RankLayout.of(pp=1, dp=2, tp=2).overview()
    assert "4 ranks: TP 2 × DP 2 × PP 1" in overview
    assert "[0 1] [2 3]" in overview
    assert "[0 2] [1 3]" in overview


def test_one_process_needs_no_group() -> None:
    with pytest.raises(RuntimeError, match="init_all_env"):
        GlobalEnv.instance()
    env = init_all_env(ModelParallelConfig(), device="cpu")
    assert GlobalEnv.instance() is env
    assert [env.group(axis) for axis in ("tp", "dp", "pp")] == [None, None, None]
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="destroy_all_env"):
        init_all_env()
    destroy_all_env()
    with pytest.raises(RuntimeError, match="init_all_env"):
        GlobalEnv.instance()
    destroy_all_env()


def test_too_few_processes_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"1 rank,.*2 × 1 = 2"):
        init_all_env(tensor_parallel_size=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_absent_cuda_is_refused() -> None:
    with pytest.raises(UserError, match=r"--device cuda.*finds no CUDA device"):
        init_all_env(device="cuda")
