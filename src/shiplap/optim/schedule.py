"""The learning rate as a pure function of the step: linear warm-up, then half a cosine (Loshchilov & Hutter 2017)."""

import math

from shiplap.config import OptimizerOptions


def learning_rate_at(step: int, options: OptimizerOptions) -> float:
    """The learning rate of an optimizer step.

    It rises in a straight line from 0, which would be the step before the first, to the peak at step
    `warmup_iteration`, and falls from there to the minimum, which would be the step after the last. So no step is
    wasted on a rate of 0.

    Args:
        step: the optimizer step, from 0.
        options: peak, minimum, and the lengths of warm-up and run in steps.
    """
    peak, minimum = options.learning_rate, options.min_learning_rate
    warmup = options.warmup_iteration
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (options.num_iteration - warmup)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
