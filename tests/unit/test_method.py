"""The names of methods, and what is said of those that do not exist."""

import pytest
import torch

from shiplap.overlap.method import Method
from shiplap.overlap.primitives import gather_and_consume, is_prefetched, produce_and_scatter


@pytest.mark.parametrize(
    ("text", "name", "numbers", "in_turns"),
    [
        ("ring", "ring", (), False),
        ("columns:8", "columns", (8,), False),
        ("columns:1,2,2,3 in turns", "columns", (1, 2, 2, 3), True),
        ("direct in turns", "direct", (), True),
    ],
)
def test_a_name_says_what_numbers_and_whether_in_turns(
    text: str, name: str, numbers: tuple[int, ...], *, in_turns: bool
) -> None:
    assert Method.parse(text) == Method(name=name, numbers=numbers, in_turns=in_turns)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("rign", "no method rign here; there is replicated, sequential, ring"),
        ("exchange", "no method exchange here"),
        ("sequential in turns", "sequential takes no turns"),
        ("sequential:2", "sequential takes no numbers"),
        ("columns:0,0", "not all of them 0"),
    ],
)
def test_a_gather_that_does_not_exist_is_refused(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_and_consume(method, torch.ones(2, 2), lambda rows, part: None, group=None)


@pytest.mark.parametrize("method", ["reduce in turns", "pieces:2,1 in turns", "bulk in turns"])
def test_what_is_done_by_collectives_takes_no_turns(method: str) -> None:
    with pytest.raises(ValueError, match="takes no turns"):
        produce_and_scatter(method, lambda rows, out: None, torch.Size([2, 2]), like=torch.ones(1), group=None)


def test_all_of_x_is_there_before_wgrad_with_turns_too() -> None:
    assert is_prefetched("direct in turns")
    assert not is_prefetched("columns:8 in turns")
