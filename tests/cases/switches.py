"""All settings of the overlap switches."""

from collections.abc import Iterator
from itertools import product

from shiplap import ModelParallelConfig

SUB_SWITCHES = (
    "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
)


def topologies(tensor_parallel_size: int) -> Iterator[ModelParallelConfig]:
    """Without sequence parallelism; with it but no overlap; and, for TP > 1, every combination of the sub-switches."""
    yield ModelParallelConfig(tensor_parallel_size=tensor_parallel_size)
    if tensor_parallel_size == 1:
        return
    yield ModelParallelConfig(tensor_parallel_size=tensor_parallel_size, sequence_parallel=True)
    for values in product((False, True), repeat=len(SUB_SWITCHES)):
        yield ModelParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            sequence_parallel=True,
            tp_comm_overlap=True,
            **dict(zip(SUB_SWITCHES, values, strict=True)),
        )


def everything_on(tensor_parallel_size: int) -> ModelParallelConfig:
    """Every switch that starts an overlap."""
    return ModelParallelConfig(
        tensor_parallel_size=tensor_parallel_size,
        sequence_parallel=True,
        tp_comm_overlap=True,
        tp_comm_overlap_rs_dgrad=True,
    )
