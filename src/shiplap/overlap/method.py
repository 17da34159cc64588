"""The name of a method of `shiplap.overlap.primitives`, taken apart: `columns:1,2,2,3 in turns`."""

from dataclasses import dataclass
from typing import Self

IN_TURNS = " in turns"


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method's name says.

    Attributes:
        name: of the method itself.
        numbers: that stand behind a colon; none where there is no colon.
        in_turns: whether its transfers follow one another.
    """

    name: str
    numbers: tuple[int, ...]
    in_turns: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """From its name.

        Raises:
            ValueError: what follows the colon is no numbers.
        """
        name, _, numbers = text.removesuffix(IN_TURNS).partition(":")
        return cls(
            name=name,
            numbers=tuple(int(number) for number in numbers.split(",")) if numbers else (),
            in_turns=text.endswith(IN_TURNS),
        )
