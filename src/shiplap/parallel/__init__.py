"""How a built model is parallelised beyond the layers that it consists of."""

from shiplap.parallel.apply import apply
from shiplap.parallel.data import accumulating

__all__ = ["accumulating", "apply"]
