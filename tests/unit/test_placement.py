"""Placement of parameters: parts and the whole are each other's inverse, padding, fused views and two axes included."""

from itertools import product

import pytest
import torch
from torch import Tensor

from shiplap.config import ModelParallelConfig
from shiplap.families import preset
from shiplap.models.decoder import build_model
from shiplap.tensor_parallel.parameters import named_placements
from shiplap.tensor_parallel.placement import TP, Block, Coordinate, Coordinates, Placement, Split

PLACEMENTS = [
    Placement(full_shape=(12, 5)),
    Placement(full_shape=(12, 5), splits={TP: Split()}),
    Placement(full_shape=(5, 12), splits={TP: Split(dim=1)}),
    Placement(full_shape=(12,), splits={TP: Split()}),
    Placement(full_shape=(7, 3), splits={TP: Split()}),
    Placement(full_shape=(7, 3), splits={TP: Split(multiple=4)}),
    Placement(full_shape=(24, 5), splits={TP: Split(blocks=2 * (Block(size=12),))}),
    Placement(full_shape=(22, 5), splits={TP: Split(blocks=(Block(size=12, unit=2), Block(size=10, unit=2)))}),
    Placement(full_shape=(16,), splits={TP: Split(blocks=(Block(size=12), Block(size=4, unit=4)))}),
    # What sharded data parallelism adds: the rows that are left, divided once more.
    Placement(full_shape=(7, 3), splits={TP: Split(multiple=4), "dp": Split()}),
    Placement(full_shape=(24, 5), splits={TP: Split(blocks=2 * (Block(size=12),)), "dp": Split()}),
    Placement(full_shape=(5, 12), splits={TP: Split(dim=1), "dp": Split()}),
]


def everywhere(num_ranks: int) -> list[Coordinates]:
    """Every rank of a grid with so many along TP and two along DP."""
    return [{TP: Coordinate(tp, num_ranks), "dp": Coordinate(dp, 2)} for dp, tp in product(range(2), range(num_ranks))]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parts_put_together_are_the_whole(placement: Placement, num_ranks: int) -> None:
    full, again = numbered(placement.full_shape), torch.zeros(placement.full_shape)
    for at in everywhere(num_ranks):
        part = placement.take(full, at)
        assert tuple(part.shape) == placement.local_shape(at)
        placement.put(again, part, at)
    assert torch.equal(again, full)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_element_is_owned_once_and_counted_once(placement: Placement, num_ranks: int) -> None:
    full = numbered(placement.full_shape)
    owned = torch.zeros(placement.full_shape)
    counted: list[Tensor] = []
    for at in everywhere(num_ranks):
        for region in placement.owned(at):
            assert region.sizes == tuple(placement.take(full, at)[region.here].shape)
            owned[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))] += 1
        counted += placement.counted(placement.take(full, at), at)
    assert bool((owned == 1).all())
    assert torch.equal(torch.cat([part.flatten() for part in counted]).sort().values, full.flatten())


def test_more_ranks_than_rows_leave_some_with_zeros() -> None:
    placement = Placement(full_shape=(3, 2), splits={TP: Split()})
    parts = [placement.take(torch.ones(3, 2), {TP: Coordinate(rank, 8)}) for rank in range(8)]
    assert [int(part.sum()) for part in parts] == [2, 2, 2, 0, 0, 0, 0, 0]


def test_gate_and_up_of_a_rank_stand_together() -> None:
    placement = Placement(full_shape=(8, 1), splits={TP: Split(blocks=2 * (Block(size=4),))})
    part = placement.take(torch.arange(8.0).view(8, 1), {TP: Coordinate(1, 2)})
    assert part.flatten().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "held"),
    [
        (1, 4, [[0], [0], [0], [0]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0, 1], [1, 2]]),
        (3, 4, [[0], [0, 1], [1, 2], [2]]),
        (4, 2, [[0, 1], [2, 3]]),
    ],
)
def test_ranks_hold_every_head_that_their_even_share_touches(
    num_heads: int, num_ranks: int, held: list[list[int]]
) -> None:
    split = Split(blocks=(Block(size=2 * num_heads, unit=2),))
    placement = Placement(full_shape=(2 * num_heads,), splits={TP: split})
    full = torch.arange(num_heads).repeat_interleave(2)
    places: list[Coordinates] = [{TP: Coordinate(rank, num_ranks)} for rank in range(num_ranks)]
    assert [placement.take(full, at)[::2].tolist() for at in places] == held
    counted = [part for at in places for part in placement.counted(placement.take(full, at), at)]
    assert torch.equal(torch.cat(counted), full)
    assert split.is_shared(num_ranks) == (sum(map(len, held)) > num_heads)


def test_a_model_names_each_parameter_once_with_its_placement() -> None:
    model = build_model("gpt2", preset("gpt2", "gpt2-debug"), parallel=ModelParallelConfig(), group=None, seed=0)
    placements = dict(named_placements(model))
    assert list(placements) == [name for name, _ in model.named_parameters()]
    assert {name for name, placement in placements.items() if TP not in placement.splits} == {
        name for name in placements if "norm" in name or "positions" in name or name.endswith(("proj.bias", "fc2.bias"))
    }
    for name, parameter in model.named_parameters():
        assert placements[name].local_shape({TP: Coordinate(0, 1)}) == tuple(parameter.shape)
