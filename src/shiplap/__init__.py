"""Tensor- and sequence-parallel training, with the communication hidden behind the matrix products."""

from shiplap.config import ModelParallelConfig
from shiplap.dist import GlobalEnv, destroy_all_env, init_all_env
from shiplap.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

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
