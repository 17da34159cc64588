"""Tables in which every pair of settings comes together at least once, instead of all products."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Setting = dict[str, Any]


def pairwise(
    choices: Mapping[str, Sequence[Any]], is_possible: Callable[[Setting], bool] = lambda setting: True
) -> list[Setting]:
    """Settings, one choice for each name, in which every pair of choices that is possible comes at least once.

    Greedy: each new setting begins with a pair that has not come yet, and takes for every other name what adds most.

    Args:
        choices: by name; hashable.
        is_possible: whether a setting makes sense; one that does not is left out, and so is a pair that comes in none.
    """
    missing = dict.fromkeys(
        frozenset([(one, a), (other, b)])
        for one, other in combinations(choices, 2)
        for a in choices[one]
        for b in choices[other]
    )
    settings = []
    while missing:
        pair = next(iter(missing))
        setting = _extended(dict(pair), choices, missing, is_possible)
        del missing[pair]
        if setting is not None:
            settings.append({name: setting[name] for name in choices})
            for found in combinations(setting.items(), 2):
                missing.pop(frozenset(found), None)
    return settings


def _extended(
    setting: Setting,
    choices: Mapping[str, Sequence[Any]],
    missing: Mapping[frozenset[Any], None],
    is_possible: Callable[[Setting], bool],
) -> Setting | None:
    """The setting with a choice for every other name, tried in the order of what they add; None: none is possible."""
    rest = [name for name in choices if name not in setting]
    if not rest:
        return setting if is_possible(setting) else None

    def gain(choice: Any) -> int:
        return sum(frozenset([(rest[0], choice), known]) in missing for known in setting.items())

    for choice in sorted(choices[rest[0]], key=gain, reverse=True):
        found = _extended({**setting, rest[0]: choice}, choices, missing, is_possible)
        if found is not None:
            return found
    return None
