"""Division of parameters: shards and the whole are each other's inverse, padding and fused views included."""

import pytest
import torch

from shiplap.config import ModelParallelConfig
from shiplap.config.presets import preset
from shiplap.models.registry import build_model
from shiplap.tensor_parallel.placement import Block, Shard, named_shards


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shard",
    [
        Shard(full_shape=(12, 5)),
        Shard(full_shape=(5, 12), dim=1),
        Shard(full_shape=(12,)),
        Shard(full_shape=(7, 3)),
        Shard(full_shape=(7, 3), multiple=4),
        Shard(full_shape=(24, 5), blocks=(Block(size=12), Block(size=12))),
        Shard(full_shape=(22, 5), blocks=(Block(size=12, unit=2), Block(size=10, unit=2))),
        Shard(full_shape=(16,), blocks=(Block(size=12, unit=1), Block(size=4, unit=4))),
    ],
)
def test_shards_put_together_are_the_whole(shard: Shard, num_shards: int) -> None:
    full = torch.arange(torch.Size(shard.full_shape).numel()).float().view(shard.full_shape)
    shards = [shard.shard(full, rank, num_shards) for rank in range(num_shards)]
    assert [tuple(part.shape) for part in shards] == [shard.shard_shape(rank, num_shards) for rank in range(num_shards)]
    assert torch.equal(shard.full(shards), full)


def test_more_ranks_than_rows_leave_some_with_zeros() -> None:
    shard = Shard(full_shape=(3, 2))
    parts = [shard.shard(torch.ones(3, 2), rank, 8) for rank in range(8)]
    assert [int(part.sum()) for part in parts] == [2, 2, 2, 0, 0, 0, 0, 0]
    assert torch.equal(shard.full(parts), torch.ones(3, 2))


def test_gate_and_up_of_a_rank_stand_together() -> None:
    shard = Shard(full_shape=(8, 1), blocks=(Block(size=4), Block(size=4)))
    full = torch.arange(8.0).view(8, 1)
    assert shard.shard(full, 1, 2).flatten().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("num_heads", "num_shards", "held"),
    [
        (1, 4, [[0], [0], [0], [0]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0, 1], [1, 2]]),
        (3, 4, [[0], [0, 1], [1, 2], [2]]),
        (4, 2, [[0, 1], [2, 3]]),
    ],
)
def test_ranks_hold_every_head_that_their_even_share_touches(
    num_heads: int, num_shards: int, held: list[list[int]]
) -> None:
    shard = Shard(full_shape=(2 * num_heads,), blocks=(Block(size=2 * num_heads, unit=2),))
    full = torch.arange(num_heads).repeat_interleave(2)
    assert [shard.shard(full, rank, num_shards)[::2].tolist() for rank in range(num_shards)] == held
    counted = [
        part
        for rank in range(num_shards)
        for part in shard.counted(shard.shard(full, rank, num_shards), rank, num_shards)
    ]
    assert torch.equal(torch.cat(counted), full)
    assert shard.is_shared(num_shards) == (sum(map(len, held)) > num_heads)


def test_a_model_names_each_parameter_once_with_its_division() -> None:
    model = build_model("gpt2", preset("gpt2", "gpt2-debug"), parallel=ModelParallelConfig(), group=None)
    divided = dict(named_shards(model))
    assert list(divided) == [name for name, _ in model.named_parameters()]
    assert {name for name, shard in divided.items() if shard is None} == {
        name for name in divided if "norm" in name or "positions" in name or name.endswith(("proj.bias", "fc2.bias"))
    }
    for name, parameter in model.named_parameters():
        if (shard := divided[name]) is not None:
            assert shard.shard_shape(0, 1) == tuple(parameter.shape)
