"""Data parallelism: several replicas of the model, each on its own part of the batch. Thin, over PyTorch's own."""

from shiplap.data_parallel.replica import accumulating, replicate

__all__ = ["accumulating", "replicate"]
