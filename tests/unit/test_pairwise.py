"""Every possible pair comes, and far fewer settings than in the product."""

from itertools import combinations, product

from tests.cases.pairwise import pairwise


def test_every_pair_comes_in_few_settings() -> None:
    choices = {"a": range(6), "b": range(4), "c": range(3), "d": range(2)}
    settings = pairwise(choices)
    for one, other in combinations(choices, 2):
        found = {(setting[one], setting[other]) for setting in settings}
        assert found == set(product(choices[one], choices[other]))
    assert 24 <= len(settings) <= 30 < 6 * 4 * 3 * 2


def test_what_is_impossible_is_left_out_and_nothing_else() -> None:
    choices = {"a": range(4), "b": range(4), "c": range(2)}
    settings = pairwise(choices, lambda setting: setting["a"] != setting["b"])
    assert {(s["a"], s["b"]) for s in settings} == {(a, b) for a, b in product(range(4), range(4)) if a != b}
    assert {(s["a"], s["c"]) for s in settings} == set(product(range(4), range(2)))
