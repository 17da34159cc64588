"""What was measured of a subject, and what follows: medians, ratios, and how much communication is hidden."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from shiplap.tools.bench.subject import COMMUNICATION, FASTEST, PRODUCTS, SEQUENTIAL, Subject
from shiplap.tuning.race import choose
from shiplap.tuning.statistics import Samples, clearly_above, ratios

_NOISE = 0.02
"""Of the time without overlap: what is less is no communication that could be hidden. An assumption."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The samples of a subject.

    Attributes:
        subject: what was measured; of its variants only the names are needed, and those are in the samples.
        samples: milliseconds of each variant, a value a round.
    """

    subject: Subject
    samples: Samples

    def median_ms(self, name: str) -> float:
        """The median of a variant."""
        return median(self.samples[name])

    def quartiles_ms(self, name: str) -> tuple[float, float]:
        """The lower and the upper quartile of a variant."""
        return _quartiles(self.samples[name])

    @property
    def communication(self) -> str:
        """The smallest of the variants that are communication alone."""
        return min(self.subject.communication, key=self.median_ms)

    @property
    def fastest(self) -> str:
        """The fastest way that the switches allow, nothing overlapped unless another is clearly faster.

        Of a part, the fastest ways of all its layers together.
        """
        if FASTEST in self.subject.chosen:
            return self.subject.chosen[FASTEST]
        return choose({name: self.samples[name] for name in self.subject.candidates}).name

    def speedup(self, name: str) -> float:
        """How many times as fast as without overlap: the median of the ratios of each round."""
        return median(ratios(self.samples, SEQUENTIAL, name))

    def relative(self, name: str) -> tuple[float, float, float]:
        """A variant's time over that without overlap, round by round: lower quartile, median, upper quartile."""
        values = ratios(self.samples, name, SEQUENTIAL)
        low, high = _quartiles(values)
        return low, median(values), high

    @property
    def bound(self) -> float:
        """The larger of products and the smallest communication, over the time without overlap."""
        return median(bound / own for bound, own in zip(self._bounds, self.samples[SEQUENTIAL], strict=False))

    @property
    def _bounds(self) -> list[float]:
        """What no overlap can be faster than, round by round."""
        samples = self.samples
        return [max(pair) for pair in zip(samples[PRODUCTS], samples[self.communication], strict=False)]

    def hidden(self, name: str) -> float | None:
        """How much of what could be hidden is: 1 is the bound, 0 is no overlap, less than 0 is slower than that.

        The median over the rounds. None where there is nothing to hide, as far as noise tells.
        """
        pairs = list(zip(self.samples[SEQUENTIAL], self._bounds, strict=False))
        could = [a - b for a, b in pairs]
        if not clearly_above([a / b for a, b in pairs], 1.0) or median(could) <= _NOISE * self.median_ms(SEQUENTIAL):
            return None
        gained = [a - b for a, b in zip(self.samples[SEQUENTIAL], self.samples[name], strict=False)]
        return median(a / b for a, b in zip(gained, could, strict=False) if b > 0)

    def method(self, name: str) -> str:
        """The methods of a variant."""
        return self.subject.methods.get(name, name.removeprefix(COMMUNICATION))

    def roles(self, name: str) -> list[str]:
        """What a variant is: it may be several things at once."""
        subject = self.subject
        roles = [name] if name in (PRODUCTS, SEQUENTIAL) else []
        roles += ["communication"] if name in subject.communication else []
        roles += ["candidate"] if name in subject.candidates else []
        roles += [role for role, chosen in subject.chosen.items() if chosen == name]
        return roles + (["peer"] if name in subject.peers else [])

    def records(self) -> list[dict[str, Any]]:
        """An object for each measurement, and for each that could not be made."""
        subject = self.subject
        common: dict[str, Any] = {
            "what": subject.what,
            "name": subject.name,
            "count": subject.count,
            "pass": subject.direction,
            "message_bytes_per_rank": subject.message_bytes_per_rank,
        }
        return [
            *(common | self._record(name) for name in self.samples),
            *(
                common | {"variant": peer, "roles": ["peer"], "why_not": why_not}
                for peer, why_not in subject.why_not.items()
            ),
        ]

    def _record(self, name: str) -> dict[str, Any]:
        low, high = self.quartiles_ms(name)
        is_alone = name == PRODUCTS or name in self.subject.communication
        return {
            "variant": name,
            "roles": self.roles(name),
            "method": None if name == PRODUCTS or name in self.subject.peers else self.method(name),
            "median_ms": round(self.median_ms(name), 6),
            "quartile_low_ms": round(low, 6),
            "quartile_high_ms": round(high, 6),
            "rounds": len(self.samples[name]),
            "speedup_over_sequential": None if is_alone else self.speedup(name),
            "hidden_fraction": None if is_alone else self.hidden(name),
            "why_not": None,
        }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one; of a single value, that."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
