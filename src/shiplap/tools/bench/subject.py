"""What is measured together: one pass of one kind of layer, or one part of a block, in all its variants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shiplap.overlap import registry
from shiplap.tuning.race import is_out, leader_of
from shiplap.tuning.statistics import Samples, noise_of

PRODUCTS = "products"
SEQUENTIAL = str(registry.SEQUENTIAL)
SWITCHES = "switches"
MEASURED = "measured plan"
FASTEST = "fastest methods"
COMMUNICATION = "communication: "
"""What variants are called, the last one with the method behind it."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One pass of a kind of layer, or a part.

    Attributes:
        what: `layer` or `part`.
        name: the folded path of the layers, or the part's name.
        count: of such layers or parts in the model.
        direction: `forward`, `backward`, or `forward+backward` of parts.
        message_bytes_per_rank: what each rank sends in the pass of one of them.
        variants: what is timed, by name; each gives milliseconds that all ranks agree on. `products` and `sequential`
            are among them.
        communication: the variants that are communication alone, nothing overlapped first.
        candidates: the variants that are methods to choose from, nothing overlapped first.
        chosen: the variants that somebody's choice is: `switches`, and perhaps `measured plan` and `fastest methods`.
        methods: the methods of a variant, where its name does not say them.
        peers: the variants that are others' code.
        why_not: why some of these are not there, by their name.
    """

    what: str
    name: str
    count: int
    direction: str
    message_bytes_per_rank: int
    variants: Mapping[str, Callable[[], float]]
    communication: Sequence[str]
    candidates: Sequence[str]
    chosen: Mapping[str, str]
    methods: Mapping[str, str] = field(default_factory=dict)
    peers: Sequence[str] = ()
    why_not: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, and of how many it is."""
        return self.name if self.count == 1 else f"{self.name} × {self.count}"


def measure(subject: Subject, rounds: int) -> Samples:
    """Run all variants in turns, in an order that rotates. All ranks do so together.

    Candidates that are clearly slower than the fastest are not measured in every round, and neither are ways to
    communicate. What ratios and bounds are made of always is.

    Args:
        subject: what to measure.
        rounds: how often.

    Returns:
        Milliseconds of each variant, a value a round; those that dropped out have fewer.
    """
    samples: dict[str, list[float]] = {name: [] for name in subject.variants}
    always = {PRODUCTS, SEQUENTIAL, subject.communication[0], *subject.chosen.values(), *subject.peers}
    running = list(samples)
    for number in range(rounds):
        start = number % len(running)
        for name in running[start:] + running[:start]:
            samples[name].append(subject.variants[name]())
        for group in (subject.candidates, subject.communication):
            of_group = {name: samples[name] for name in group}
            leader, noise = leader_of(of_group), noise_of(of_group)
            running = [
                name
                for name in running
                if name not in group or name in (*always, leader) or not is_out(samples, name, leader, noise=noise)
            ]
    return samples
