"""Explaining what overlaps in a training run. The command line is generated from these dataclasses."""

import dataclasses
from dataclasses import dataclass

from shiplap.config.option import option
from shiplap.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How it is shown."""

    json: bool = option(False, "Print JSON lines, one for each kind of layer and site, instead of a table.")


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(TrainConfig):
    """One call of `shiplap explain`: the run that it is about, and how it is shown."""

    output: ExplainOptions = dataclasses.field(default_factory=ExplainOptions)
