"""How the model is laid out over ranks, and which communication hides behind which matrix product."""

from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar, Literal

from shiplap.config.option import UserError, check_at_least, flag_of, option


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of the device mesh: one way in which a run is divided over ranks.

    Attributes:
        name: short, such as `tp`.
        title: for people, such as `tensor parallel`.
        divides: what each rank along it has a part of. All ranks along an axis that divides the batch or the sequence
            hold the same weights, and the gradients of these are partial.
        option: the field of `ModelParallelConfig` that says its size; None for the axis that takes what is left of the
            world.
    """

    name: str
    title: str
    divides: Literal["layers", "batch", "sequence", "weights"]
    option: str | None

    @property
    def replicates_weights(self) -> bool:
        """Whether all ranks along it hold the same weights."""
        return self.divides in {"batch", "sequence"}


AXES = (
    Axis(name="pp", title="pipeline parallel", divides="layers", option="pipeline_parallel_size"),
    Axis(name="dp", title="data parallel", divides="batch", option=None),
    Axis(name="tp", title="tensor parallel", divides="weights", option="tensor_parallel_size"),
)
"""Slowest-varying first: ranks that are neighbours differ in the last one."""


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """Topology and overlap switches. Data parallelism is not asked for: it is world size / (TP × PP).

    The `tp_comm_*` names are Megatron-LM's. There they partly mean "use TransformerEngine's backend for it"; here
    each means exactly "overlap this, or don't". They act only with sequence parallelism and TP > 1, and none acts
    without the master switch `tp_comm_overlap`. `shiplap.overlap.plan` turns them into what each layer does.

    Raises:
        UserError: for sizes below 1, sequence parallelism with TP 1, overlap without sequence parallelism, or
            virtual pipeline stages without a pipeline.
    """

    AXES: ClassVar[tuple[Axis, ...]] = AXES

    tensor_parallel_size: int = option(
        1,
        "Tensor-parallel size (TP), in ranks: each weight matrix is split over so many.",
        flag="tensor-parallel",
    )
    sequence_parallel: bool = option(
        False,
        "Sequence parallelism (SP): between the parallel layers each TP rank keeps 1/TP of the tokens. Needs TP > 1.",
    )
    pipeline_parallel_size: int = option(1, "Pipeline-parallel size (PP), in stages.", flag="pipeline-parallel")
    virtual_pipeline_parallel_size: int = option(
        1, "Model chunks per pipeline stage. Needs PP > 1.", flag="virtual-pipeline-parallel"
    )
    tp_comm_keep_gathered: bool = option(
        False,
        "Column layers keep their input for wgrad as it was gathered in forward: TP times the memory, and no second "
        "all-gather. With or without overlap. Needs --sequence-parallel.",
    )
    tp_comm_overlap: bool = option(
        False, "Master switch: hide TP communication behind matrix products. Needs --sequence-parallel."
    )
    tp_comm_bulk_wgrad: bool = option(
        True, "Column backward: the all-gather of the activation runs under the dgrad product."
    )
    tp_comm_bulk_dgrad: bool = option(
        True, "Column backward: the reduce-scatter of the input gradient runs under the wgrad product."
    )
    tp_comm_overlap_ag: bool = option(True, "Chunked all-gather/product pipeline in Column forward and Row backward.")
    tp_comm_overlap_rs: bool = option(True, "Chunked product/reduce-scatter pipeline in Row forward.")
    tp_comm_overlap_rs_dgrad: bool = option(
        False,
        "Chunked dgrad/reduce-scatter pipeline in Column backward; where it acts it takes the place of "
        "--tp-comm-bulk-dgrad.",
    )
    tp_comm_overlap_disable_qkv: bool = option(
        False,
        "At QKV, no forward all-gather pipeline and no dgrad/reduce-scatter pipeline. Bulk overlap stays.",
    )
    tp_comm_overlap_disable_fc1: bool = option(
        False,
        "At FC1, no forward all-gather pipeline and no dgrad/reduce-scatter pipeline. Bulk overlap stays.",
    )
    tp_comm_strict: bool = option(
        False,
        "Refuse to train if a --tp-comm option is on and acts at no layer; the error lists where it could act, and why "
        "it does not.",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work, by the name of the flag."""
        check_at_least(self, 1, *(axis.option for axis in self.AXES if axis.option), "virtual_pipeline_parallel_size")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise UserError(
                "--sequence-parallel shards the sequence over the tensor-parallel ranks, so it needs "
                "--tensor-parallel > 1, got 1. Raise --tensor-parallel, or drop --sequence-parallel."
            )
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise UserError(
                "--tp-comm-overlap hides the all-gathers and reduce-scatters of sequence parallelism, so it needs "
                "--sequence-parallel (and --tensor-parallel > 1). Add it, or drop --tp-comm-overlap."
            )
        if self.tp_comm_keep_gathered and not self.sequence_parallel:
            raise UserError(
                "--tp-comm-keep-gathered keeps what sequence parallelism gathers, so it needs --sequence-parallel. "
                "Add it, or drop --tp-comm-keep-gathered."
            )
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise UserError(
                f"--virtual-pipeline-parallel {self.virtual_pipeline_parallel_size} needs "
                "--pipeline-parallel > 1, got 1."
            )

    @property
    def chosen_sizes(self) -> dict[str, int]:
        """Sizes of the axes that have an option, by its flag, fastest-varying first."""
        flags = {field.name: flag_of(field) for field in fields(self)}
        options = [axis.option for axis in reversed(self.AXES) if axis.option is not None]
        return {flags[option]: getattr(self, option) for option in options}

    @property
    def model_parallel_size(self) -> int:
        """The least number of ranks, of which the world is a multiple: TP × PP."""
        return prod(self.chosen_sizes.values())


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How what the switches let overlap is overlapped."""

    tp_comm_plan: str | None = option(
        None,
        "A measured plan, as `shiplap tune` writes it; or `auto`: measure before the first step, unless a plan for the "
        "same hardware, shapes and versions was kept. Default: the methods of the switches. Needs --tp-comm-overlap.",
    )
    tp_comm_plan_seconds: float | None = option(
        None,
        "At most so many seconds of measuring with `auto`; what is not clear by then does not overlap. Default: 60.",
    )

    def __post_init__(self) -> None:
        """Refuse times that are none, or for nothing."""
        check_at_least(self, 1, "tp_comm_plan_seconds")
        if self.tp_comm_plan_seconds is not None and not self.is_auto:
            raise UserError(
                f"--tp-comm-plan-seconds {self.tp_comm_plan_seconds:g} limits the measuring of --tp-comm-plan auto, "
                "which is not asked for. Add it, or drop the limit."
            )

    @property
    def is_auto(self) -> bool:
        """Whether to measure at the start."""
        return self.tp_comm_plan == AUTO

    @property
    def seconds(self) -> float:
        """The limit of `auto`."""
        return 60.0 if self.tp_comm_plan_seconds is None else self.tp_comm_plan_seconds
