"""Measuring which overlap is the fastest. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass

from shiplap.config.option import UserError, check_at_least, option
from shiplap.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How it is measured, and where the plan goes."""

    output: str = option("plan.json", "File for the plan, which `--tp-comm-plan FILE` uses. It is replaced.")
    seconds: float | None = option(
        None,
        "At most so many seconds of measuring. Default: until every choice is clear, or 20 rounds and 5 seconds of a "
        "pass are over; where nothing is clearly faster than no overlap, it is then measured alone with the best.",
    )
    keep_fastest: bool = option(
        False,
        "Let Column layers keep their gathered input where that is clearly faster, whatever the memory. Otherwise what "
        "it would save and cost is only shown.",
    )
    exhaustive: bool = option(
        False, "Measure every method in all of 60 rounds, also those that are clearly slower: to check the choice."
    )

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        check_at_least(self, 1, "seconds")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(TrainConfig):
    """One call of `shiplap tune`: the run that it is for, and how it is measured."""

    tune: TuneOptions = dataclasses.field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        """Refuse a run in which nothing could overlap."""
        super().__post_init__()
        if not self.parallel.tp_comm_overlap:
            raise UserError(
                "tune measures what may overlap, so it needs --tp-comm-overlap (and --sequence-parallel, "
                "--tensor-parallel > 1). Switches that are off, such as --tp-comm-overlap-rs-dgrad, are not measured."
            )
        if self.plan.tp_comm_plan is not None:
            raise UserError(f"tune makes a plan; --tp-comm-plan {self.plan.tp_comm_plan} is for runs that use one.")
