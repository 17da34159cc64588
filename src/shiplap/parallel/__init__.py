"""Data parallelism: several replicas of the model, each on its own part of the batch. Thin, over PyTorch's own."""

from shiplap.parallel.data import accumulating, replicate

__all__ = ["accumulating", "replicate"]
