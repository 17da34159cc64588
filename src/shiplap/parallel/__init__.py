"""How a built model is parallelised beyond the layers that it consists of."""

from shiplap.parallel.apply import Recompute, apply, apply_recompute
from shiplap.parallel.data import accumulating

__all__ = ["Recompute", "accumulating", "apply", "apply_recompute"]
