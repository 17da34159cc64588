"""Tensor- and sequence-parallel training, with the communication hidden behind the matrix products."""

from shiplap.config import ModelParallelConfig
from shiplap.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shiplap.topology import GlobalEnv, destroy_all_env, init_all_env

__all__ = [
    "ColumnParallelLinear",
    "GlobalEnv",
    "ModelParallelConfig",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "destroy_all_env",
    "init_all_env",
]
__version__ = "0.1.0"
