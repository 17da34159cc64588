"""Experts in training: what is reported about their use, whatever the layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shiplap.layers.moe import Routing, balance
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import metrics

LAYERS, EXPERTS, TAKEN = 2, 4, 2
# The sequence length is odd: the last rank pads, and padding must not be counted.
SEQUENCE, TOKENS = 15, 15 * 8
COMMAND = (
    f"train mixtral --num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --dropout 0 "
    f"--num-experts {EXPERTS} --max-sequence-length 32 --sequence-length {SEQUENCE} --num-iteration 2 "
    "--val-loss-every 2 --learning-rate 1e-3"
)


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (1, "--batch-size 8"),
        (1, f"--batch-size 2 --total-batch-size {TOKENS}"),
        (2, "--batch-size 8 --tensor-parallel 2"),
        (2, "--batch-size 8 --tensor-parallel 2 --sequence-parallel --tp-comm-overlap --recompute full"),
        (2, "--batch-size 4"),
        (4, "--batch-size 4 --tensor-parallel 2 --sequence-parallel"),
    ],
)
def test_every_token_is_counted_once_for_each_expert_that_it_takes(
    ranks: Callable[[int], RankPool], tmp_path: Path, num_ranks: int, flags: str
) -> None:
    alone = metrics(ranks(1), f"{COMMAND} --batch-size 8", tmp_path / "alone")
    records = metrics(ranks(num_ranks), f"{COMMAND} {flags}", tmp_path / "run")
    for record in records[:2]:
        counts = record["tokens_per_expert"]
        assert [len(layer) for layer in counts] == [EXPERTS] * LAYERS  # type: ignore[attr-defined]
        assert [sum(layer) for layer in counts] == [TOKENS * TAKEN] * LAYERS  # type: ignore[attr-defined]
    # The first step's weights are the same; a token near a tie may go elsewhere in the last bits.
    assert records[0]["train_loss"] == pytest.approx(alone[0]["train_loss"], rel=1e-3)
    if "total" not in flags:
        assert records[0]["balance_loss"] == pytest.approx(alone[0]["balance_loss"], rel=0.05)
    assert records[2]["val_loss"] == pytest.approx(alone[2]["val_loss"], rel=1e-2)


def test_a_layer_that_uses_one_expert_is_not_excused_by_another_layer() -> None:
    def layer(favourite: int) -> Routing:
        probabilities = torch.full((6, 1, 2), 0.1)
        probabilities[..., favourite] = 0.9
        return Routing(probabilities=probabilities, experts=torch.full((6, 1, 1), favourite))

    even = Routing(probabilities=torch.full((6, 1, 2), 0.5), experts=torch.arange(6).view(6, 1, 1) % 2)
    assert float(balance([even, even], sequence_length=6, group=None).loss) == pytest.approx(1.0)
    lopsided = balance([layer(0), layer(1)], sequence_length=6, group=None)
    assert float(lopsided.loss) == pytest.approx(2 * 0.9)
    assert lopsided.tokens_per_expert.tolist() == [[6, 0], [0, 6]]


def test_padding_is_not_counted() -> None:
    probabilities = torch.full((4, 1, 2), 0.5)
    probabilities[3] = torch.tensor([1.0, 0.0])
    routing = Routing(probabilities=probabilities, experts=torch.tensor([0, 1, 0, 0]).view(4, 1, 1))
    found = balance([routing], sequence_length=3, group=None)
    assert found.tokens_per_expert.tolist() == [[2, 1]]
    assert float(found.loss) == pytest.approx(1.0)
