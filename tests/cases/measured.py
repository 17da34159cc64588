"""A measured plan of a small run as if it had been measured, and ways to damage its file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiplap.config import DataOptions, ModelOptions, ModelParallelConfig, TrainConfig
from shiplap.config.lora import LoraOptions
from shiplap.config.parallel import PlanOptions
from shiplap.dist.axes import layout_for
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.models.decoder import DecoderModel
from shiplap.train.setup import resolve_structure
from shiplap.tuning.kinds import kinds_of
from shiplap.tuning.measured import Kept, MeasuredPass, MeasuredPlan, Timing
from shiplap.tuning.run import conditions_of, given_plan

SMALL = ModelOptions(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
FIELDS = {
    ("column", "forward"): {"forward": "ring:2"},
    ("column", "backward"): {"dgrad": "bulk_p2p", "wgrad": "ring", "keeps": "shard"},
    ("row", "forward"): {"forward": "row_chunks"},
    ("row", "backward"): {"dgrad": "sequential"},
}


def run_of(
    *,
    size: int = 2,
    model: ModelOptions = SMALL,
    lora: LoraOptions | None = None,
    data: DataOptions | None = None,
    **switches: Any,
) -> TrainConfig:
    """A small run with overlap, but for what is said."""
    asked = {"tensor_parallel_size": size, "sequence_parallel": True, "tp_comm_overlap": True} | switches
    return TrainConfig(
        parallel=ModelParallelConfig(**asked),
        model=model,
        lora=lora or LoraOptions(),
        data=data or DataOptions(batch_size=3, sequence_length=15),
    )


def model_of(config: TrainConfig) -> DecoderModel:
    sizes, adapters = resolve_structure("gpt2", config)
    return skeleton("gpt2", config, model=sizes, adapters=adapters)


def plan_of(config: TrainConfig) -> MeasuredPlan:
    """A plan for a run as if it had been measured."""
    passes = [
        MeasuredPass(
            layers=kind.paths,
            layer=kind.description,
            direction=direction,
            method=", ".join(FIELDS[kind.layer.kind, direction].values()),
            fields=FIELDS[kind.layer.kind, direction],
            is_clear=number % 2 == 0,
            speedup=1.0 + 0.1 * number,
            timings={
                "sequential": Timing(median_ms=1 / 3, rounds=7, speedup=1.0),
                "ring:2": Timing(median_ms=0.25, rounds=1, speedup=4 / 3),
            },
            kept=Kept(method="bulk", speedup=0.99, is_clear=False, memory_bytes=1536) if number == 1 else None,
        )
        for kind in kinds_of(parallel_layers(model_of(config)))
        for number, direction in enumerate(kind.directions)
    ]
    conditions = conditions_of(config, layout_for(config.parallel, config.parallel.tensor_parallel_size))
    return MeasuredPlan(source="here", made="2025-01-02T03:04:05+00:00", conditions=conditions, passes=passes)


def loaded(file: Path, config: TrainConfig) -> MeasuredPlan:
    """As `shiplap train`, `explain` and every rank do first."""
    given = replace(config, plan=PlanOptions(tp_comm_plan=str(file)))
    plan = given_plan(given, model_of(config), layout_for(config.parallel, config.parallel.tensor_parallel_size))
    assert plan is not None
    return plan


def damage(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def put(*keys: str | int, value: object) -> Callable[[Any], None]:
    """Put a value at this place in the file."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys: str | int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change
