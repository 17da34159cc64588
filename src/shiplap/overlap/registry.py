"""All kinds of overlap methods. A new one is a file that declares a `Kind`, and a line in here.

Names of methods are for plan files and reports: `ring`, `ring:2`, `feature_chunks:3,2,2,1 own_first paced`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from shiplap.overlap import by_features, by_rows, by_shard, whole
from shiplap.overlap.primitives import Kind, Method, Where

Need = Literal["gather", "scatter", "second gather"]
_kinds: dict[str, Kind] = {
    kind.name: kind for kind in (*whole.KINDS, *by_shard.KINDS, *by_rows.KINDS, *by_features.KINDS)
}
REPLICATED = whole.REPLICATED.method()
"""Of every site without sequence parallelism."""
SEQUENTIAL = whole.SEQUENTIAL.method()
"""The reference: nothing overlaps."""
_OLD_PACED = " in turns"


def kinds() -> Sequence[Kind]:
    """All of them, in the order in which their candidates are measured."""
    return tuple(_kinds.values())


@contextmanager
def registered(kind: Kind) -> Iterator[None]:
    """One more kind, inside: for an experiment that has no file here."""
    assert kind.name not in _kinds, kind.name
    _kinds[kind.name] = kind
    try:
        yield
    finally:
        del _kinds[kind.name]


def method(text: str) -> Method:
    """The method of this name; names in plan files of before are known, too.

    Raises:
        ValueError: there is no such method, or it takes no such numbers; says which there are.
    """
    is_paced = text.endswith(_OLD_PACED)
    name, *words = text.removesuffix(_OLD_PACED).split(" ")
    name, colon, numbers = name.partition(":")
    for kind in _kinds.values():
        for old_name, *besides in (old.split(" ") for old in kind.old_names):
            if name == old_name:
                name, words = kind.name, [*words, *besides]
    if name not in _kinds:
        raise ValueError(f"There is no overlap method {text}; there is {', '.join(_kinds)}.")
    if unknown := [word for word in words if word not in ("own_first", "paced")]:
        raise ValueError(f"The method {text} ends in {unknown[0]}; only own_first and paced can follow a name.")
    try:
        pieces = tuple(int(number) for number in numbers.split(",")) if colon else ()
    except ValueError:
        raise ValueError(f"The method {text} needs whole numbers behind the colon, such as {name}:2.") from None
    return _kinds[name].method(*pieces, own_first="own_first" in words, paced=is_paced or "paced" in words)


def of_switch(switch: str) -> Method:
    """The method that a switch of the configuration means where it is on."""
    (kind,) = (kind for kind in _kinds.values() if switch in kind.switches)
    return kind.method()


def candidates(where: Where, num_ranks: int) -> list[Method]:
    """The methods that overlap something in a place and are worth measuring there, kind by kind."""
    return [one for kind in _kinds.values() for one in kind.candidates(where, num_ranks)]


def examples(site: Need, kind: Kind) -> list[Method]:
    """Methods of a kind that show all that can be chosen of it, for a site with this need; none if it cannot do it.

    Args:
        site: `gather`, `scatter`, or `second gather` (a gather, or a prefetch).
        kind: the kind.
    """
    can = {"gather": kind.gather, "scatter": kind.scatter, "second gather": kind.gather or kind.prefetch}
    if can[site] is None:
        return []
    own_first = (False, True) if kind.takes_own_first else (False,)
    found = [
        kind.method(own_first=own, paced=paced)
        for own in own_first
        for paced in ((False, True) if kind.is_paceable else (False,))
    ]
    return [*found, kind.method(*kind.example_pieces)] if kind.example_pieces else found


def markdown_table() -> str:
    """The methods, for the documents."""
    lines = ["| method | sites | GEMM | sends by | description |", "|---|---|---|---|---|"]
    for kind in _kinds.values():
        does = {"gather": kind.gather, "scatter": kind.scatter, "prefetch": kind.prefetch}
        sites = ", ".join(name for name, function in does.items() if function is not None)
        numbers = f"; `:n,…` {kind.pieces}" if kind.pieces else ""
        flags = [f"`{word}`" for word, can in (("own_first", kind.takes_own_first), ("paced", kind.is_paceable)) if can]
        can_be = f"; can be {' and '.join(flags)}" if flags else ""
        lines.append(f"| `{kind.name}` | {sites} | {kind.cut} | {kind.transport} | {kind.summary}{numbers}{can_be} |")
    return "\n".join(lines)
