"""The measured plan of a run: read and checked, found in the cache, or measured now."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import shiplap
from shiplap.config import ModelParallelConfig, TrainConfig, UserError
from shiplap.config.json_fields import read_json_object
from shiplap.config.option import cache_folder
from shiplap.dist import GlobalEnv, RankLayout
from shiplap.dist.agreement import check_same_everywhere, fail_together, gather_texts
from shiplap.dist.hardware import device_name, ranks_per_host
from shiplap.inspection.layers import parallel_layers
from shiplap.models.decoder import DecoderModel
from shiplap.tuning.kinds import kinds_of
from shiplap.tuning.measured import Conditions, MeasuredPlan
from shiplap.tuning.plan_file import check_writable, plan_from, read_plan, write_plan
from shiplap.tuning.tune import Progress, TuneSettings, tune, unclear


def conditions_of(config: TrainConfig, layout: RankLayout, *, on_device: bool = True) -> Conditions:
    """What a plan for a run is for, as this process sees it.

    Args:
        config: the run.
        layout: of its ranks.
        on_device: whether to ask the device for its name. Who starts ranks, or none, leaves it alone: it may be absent.
    """
    size, sequence = config.parallel.tensor_parallel_size, config.data.sequence_length
    device = torch.device(config.run.device)
    return Conditions(
        tensor_parallel=size,
        data_parallel=layout.data_size,
        sequence=sequence + -sequence % size,
        batch=config.data.batch_size,
        dtype=config.run.dtype,
        device=device.type,
        hardware=device_name(device) if on_device else "",
        ranks_per_host=ranks_per_host(),
        threads=torch.get_num_threads(),
        pytorch=torch.__version__,
        shiplap=shiplap.__version__,
    )


def given_plan(config: TrainConfig, model: DecoderModel, layout: RankLayout) -> MeasuredPlan | None:
    """The plan from the file that the run names, checked; None if it names none.

    Args:
        config: the run.
        model: its skeleton.
        layout: of its ranks.

    Raises:
        UserError: the file is no plan, or one for something else.
    """
    if config.plan.tp_comm_plan is None or config.plan.is_auto:
        return None
    plan = read_plan(Path(config.plan.tp_comm_plan))
    plan = dataclasses.replace(plan, source=f"--tp-comm-plan {config.plan.tp_comm_plan}")
    plan.check(model, config.parallel, conditions_of(config, layout, on_device=False))
    return plan


def check_same_plan(config: TrainConfig, plan: MeasuredPlan | None) -> None:
    """Make sure that all ranks were given the same plan: each host reads a file of its own.

    Raises:
        AgreedError: on every rank, with the date and a digest of each.
    """
    if plan is None:
        return
    in_short = f"measured {plan.made}, {hashlib.sha256(repr(plan).encode()).hexdigest()[:16]}"
    check_same_everywhere({f"--tp-comm-plan {config.plan.tp_comm_plan}": in_short})


def found_or_measured(config: TrainConfig, model: DecoderModel, env: GlobalEnv, progress: Progress) -> MeasuredPlan:
    """The plan of `--tp-comm-plan auto`: the one in the cache, or a new one, which is then kept there.

    The cache is the first rank's. Its file's name is a hash over hardware, shapes, dtype, TP size, versions, switches,
    kinds of layers and time limit. How fast the link is, is not in it.

    Args:
        config: the run.
        model: this rank's skeleton.
        env: this rank's place.
        progress: is told how far measuring is.

    Raises:
        AgreedError: on every rank, if what is in the cache cannot be used, or nothing can be kept there.
    """
    conditions, seconds = _agreed(conditions_of(config, env.layout)), config.plan.seconds
    path = cache_folder() / "plans" / f"{_fingerprint(config.parallel, model, conditions, seconds)}.json"
    with fail_together(), _naming_the_cache():
        # Unlike Path's, this one knows no folder that it may not look into.
        kept = json.dumps(read_json_object(path)) if env.rank == 0 and os.path.exists(path) else ""
    kept = gather_texts(kept)[0]
    if kept:
        with fail_together(), _naming_the_cache():
            plan = plan_from(json.loads(kept), source=str(path))
            plan.check(model, config.parallel, conditions)
        return plan
    with fail_together():
        if env.rank == 0:
            check_writable(path)
    settings = TuneSettings(seconds=seconds)
    plan = tune(
        parallel_layers(model), config.parallel, conditions=conditions, env=env, settings=settings, progress=progress
    )
    plan = dataclasses.replace(plan, source=str(path))
    with fail_together():
        if env.rank == 0:
            write_plan(plan, path)
    return plan


@contextmanager
def _naming_the_cache() -> Iterator[None]:
    """Say what to do about a file that nobody asked for by name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} An earlier --tp-comm-plan auto kept it; remove it to measure again.") from None


def note(plan: MeasuredPlan, conditions: Conditions | None) -> str:
    """Where the plan comes from, what is otherwise than when it was measured, and where it is not clear, in words.

    Args:
        plan: the plan.
        conditions: now; None: they are not compared.
    """
    lines = [f"plan: {plan.source}, measured {plan.made}"]
    if conditions is not None and (differences := plan.differences(conditions)):
        lines.append(f"  it was measured on something else: {'; '.join(differences)}. Measure again if in doubt.")
    if open_ones := unclear(plan.passes):
        lines.append(f"  not clear, so without overlap: {', '.join(open_ones)}")
    return "\n".join(lines)


def _agreed(conditions: Conditions) -> Conditions:
    """The first rank's conditions; the rest of the job must have the same but for the hardware's name."""
    first = json.loads(gather_texts(json.dumps(dataclasses.asdict(conditions)))[0])
    check_same_everywhere({"the PyTorch version": conditions.pytorch, "the shiplap version": conditions.shiplap})
    return Conditions(**first)


def _fingerprint(parallel: ModelParallelConfig, model: DecoderModel, conditions: Conditions, seconds: float) -> str:
    kinds = [kind.description for kind in kinds_of(parallel_layers(model))]
    # Strictness changes no plan.
    parallel = dataclasses.replace(parallel, tp_comm_strict=False)
    what = [dataclasses.asdict(parallel), kinds, dataclasses.asdict(conditions), seconds]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
