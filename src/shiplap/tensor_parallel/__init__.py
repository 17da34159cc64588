"""Layers whose parameters are divided over the tensor-parallel ranks."""

from shiplap.tensor_parallel.cross_entropy import IGNORE, vocab_parallel_cross_entropy
from shiplap.tensor_parallel.embedding import VocabParallelEmbedding
from shiplap.tensor_parallel.function import LinearWithGradAccumulationAndAsyncCommunication
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "IGNORE",
    "ColumnParallelLinear",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
