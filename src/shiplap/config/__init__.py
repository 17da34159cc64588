"""What the user asks for: frozen, keyword-only dataclasses that check themselves. Standard library only."""

from shiplap.config.model import TransformerConfig
from shiplap.config.option import UserError
from shiplap.config.parallel import ModelParallelConfig
from shiplap.config.train import DataOptions, ModelOptions, OptimizerOptions, RunOptions, TrainConfig

__all__ = [
    "DataOptions",
    "ModelOptions",
    "ModelParallelConfig",
    "OptimizerOptions",
    "RunOptions",
    "TrainConfig",
    "TransformerConfig",
    "UserError",
]
