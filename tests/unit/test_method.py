"""The names of methods: those of today and of before, and what is said of those that do not exist."""

import copy

import pytest

from shiplap.overlap.registry import SEQUENTIAL, examples, kinds, method


@pytest.mark.parametrize(
    ("text", "name", "pieces", "own_first", "paced"),
    [
        ("ring", "ring", (1,), False, False),
        ("ring:4", "ring", (4,), False, False),
        ("feature_chunks", "feature_chunks", (4,), False, False),
        ("feature_chunks:8", "feature_chunks", (8,), False, False),
        ("feature_chunks:1,2,2,3 paced", "feature_chunks", (1, 2, 2, 3), False, True),
        ("feature_chunks:2 own_first paced", "feature_chunks", (2,), True, True),
        ("bulk_p2p paced", "bulk_p2p", (), False, True),
        ("shards_per_gemm:1,3", "shards_per_gemm", (1, 3), False, False),
    ],
)
def test_a_name_says_all_that_can_be_chosen(
    text: str, name: str, pieces: tuple[int, ...], *, own_first: bool, paced: bool
) -> None:
    found = method(text)
    assert (found.kind.name, found.pieces, found.own_first, found.paced) == (name, pieces, own_first, paced)
    assert str(found) == text


@pytest.mark.parametrize(
    ("before", "today"),
    [
        ("exchange", "p2p"),
        ("exchange:3 in turns", "p2p:3 paced"),
        ("direct in turns", "bulk_p2p paced"),
        ("grouped:1,3", "shards_per_gemm:1,3"),
        ("pieces:2,1,1", "row_chunks"),
        ("pieces:5,2,0,9", "row_chunks:5,2,0,9"),
        ("columns:8", "feature_chunks:8"),
        ("tiles", "feature_chunks own_first"),
        ("tiles:2 in turns", "feature_chunks:2 own_first paced"),
        ("ring:1", "ring"),
    ],
)
def test_names_of_before_still_mean_what_they_did(before: str, today: str) -> None:
    assert str(method(before)) == today


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign", "There is no overlap method rign; there is replicated, sequential, bulk"),
        ("", "There is no overlap method ; there is "),
        ("sequential paced", "The method sequential cannot be paced"),
        ("sequential:2", "The method sequential takes no numbers, got 2"),
        ("ring own_first", "The method ring cannot have the own rows first"),
        ("reduce paced", "The method reduce cannot be paced"),
        ("row_chunks:2,1 paced", "The method row_chunks cannot be paced"),
        ("bulk in turns", "The method bulk cannot be paced"),
        ("ring soon", "The method ring soon ends in soon; only own_first and paced can follow a name"),
        ("ring:", "The method ring: needs whole numbers behind the colon, such as ring:2"),
        ("feature_chunks:1,x", "needs whole numbers behind the colon"),
        ("feature_chunks:0,0", "needs numbers from 0 on, not all of them 0, got 0,0"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(text)


def test_every_kind_can_do_something_and_its_examples_have_names() -> None:
    for kind in kinds():
        found = [one for need in ("gather", "scatter", "second gather") for one in examples(need, kind)]
        assert found, kind.name
        for one in found:
            assert method(str(one)) == one


def test_a_copied_layer_has_the_same_methods() -> None:
    assert copy.deepcopy(method("ring:2")) == method("ring:2")
    assert copy.deepcopy(SEQUENTIAL).kind is SEQUENTIAL.kind
