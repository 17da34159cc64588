"""A run that is divided along one axis more than those that there are."""

from dataclasses import dataclass

from shiplap.config import ModelParallelConfig
from shiplap.config.option import option
from shiplap.config.parallel import AXES, Axis

TOY = Axis(name="toy", title="toy parallel", divides="sequence", option="toy_size")


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelParallelConfig):
    """The entry, and the option that says its size."""

    AXES = (*AXES[:2], TOY, AXES[2])

    toy_size: int = option(1, "Toy parallelism, in ranks.", flag="toy")
