"""What the user may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the closest known one, or all of them."""
    names = list(known)
    close = get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there is {', '.join(names)}."
