"""What one process knows of the whole job: the config, where this rank sits, and the process groups. Read-only.

Only the edges (command line, trainer, model builders) read it; primitives and layers take groups and config values
as arguments.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Optional

import torch
import torch.distributed as dist

# Imported for a reason: it binds the default process group as a default argument, for good. If that happens after the
# group is made (torch.optim imports it late), Gloo's threads outlive the interpreter, and sometimes abort it.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shiplap.config.option import UserError
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.axes import RankLayout, layout_for
from shiplap.dist.collectives import RankGroup


@dataclass(frozen=True, kw_only=True)
class GlobalEnv:
    """One per process, made by `init_all_env`.

    Attributes:
        config: what was asked for.
        layout: sizes of the axes, and which rank sits where.
        rank: this process, in 0 … world size - 1.
        device: where this rank computes.
        mesh: the device mesh with the layout's axes; None for a single process without torch.distributed.
        groups: this rank's group along each axis that has more than one rank.
        owns_process_group: `init_all_env` joined torch.distributed, so `destroy_all_env` leaves it.
    """

    config: ModelParallelConfig
    layout: RankLayout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    groups: Mapping[str, RankGroup]
    owns_process_group: bool

    _instance: ClassVar[Optional["GlobalEnv"]] = None

    @classmethod
    def instance(cls) -> "GlobalEnv":
        """The environment of this process.

        Raises:
            RuntimeError: before `init_all_env`.
        """
        if cls._instance is None:
            raise RuntimeError("There is no GlobalEnv yet: call shiplap.init_all_env(config) first.")
        return cls._instance

    def group(self, axis: str) -> RankGroup | None:
        """The ranks along an axis, such as `tp`, that this rank belongs to; None where it would be alone."""
        return self.groups.get(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis, such as `tp`."""
        return self.layout.coordinates(self.rank)[axis]

    @property
    def data_rank(self) -> int:
        """Which of the `layout.data_size` parts of the data this rank reads."""
        return self.layout.data_rank(self.rank)

    @property
    def is_in_first_replica(self) -> bool:
        """Whether this rank holds a part of the copy of the model that is saved and sampled from."""
        return self.layout.is_in_first_replica(self.rank)

    def overview(self) -> str:
        """All groups as text, and which rank this is."""
        return self.layout.overview()


def init_all_env(
    config: ModelParallelConfig | None = None,
    *,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_parallel_size: int = 1,
    device: str | None = None,
) -> GlobalEnv:
    """Join torch.distributed (if needed), lay out the ranks and make the process groups.

    Under `torchrun` the world is what it says. Without it there is one process, and no process group is made.

    Args:
        config: the topology and overlap switches. Without it, one is made from the four sizes.
        tensor_parallel_size: TP, in ranks.
        sequence_parallel: shard the sequence between the parallel layers.
        pipeline_parallel_size: PP, in stages.
        virtual_pipeline_parallel_size: model chunks per stage.
        device: `cpu` or `cuda`; by default CUDA where there is any.

    Returns:
        The environment, which `GlobalEnv.instance()` also gives from now on.

    Raises:
        UserError: the world size is not a multiple of the axes' sizes, or CUDA is asked for and absent.
        RuntimeError: the environment was initialised before; `destroy_all_env` undoes it.
    """
    if GlobalEnv._instance is not None:
        raise RuntimeError("init_all_env was called before; destroy_all_env() undoes it.")
    if config is None:
        config = ModelParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            sequence_parallel=sequence_parallel,
            pipeline_parallel_size=pipeline_parallel_size,
            virtual_pipeline_parallel_size=virtual_pipeline_parallel_size,
        )
    layout = layout_for(config, world_size())
    this_device = local_device(device)
    owns = not dist.is_initialized() and under_torchrun()
    if owns:
        backend = "cpu:gloo,cuda:nccl" if this_device.type == "cuda" else "gloo"
        dist.init_process_group(backend)
    mesh, groups = None, {}
    if dist.is_initialized():
        mesh = init_device_mesh(this_device.type, layout.shape, mesh_dim_names=tuple(layout.sizes))
        groups = {axis: RankGroup(mesh.get_group(axis)) for axis, size in layout.sizes.items() if size > 1}
    GlobalEnv._instance = GlobalEnv(
        config=config,
        layout=layout,
        rank=dist.get_rank() if mesh is not None else 0,
        device=this_device,
        mesh=mesh,
        groups=groups,
        owns_process_group=owns,
    )
    return GlobalEnv._instance


def destroy_all_env() -> None:
    """Undo `init_all_env`: leave the groups it made, and torch.distributed if it joined it."""
    env, GlobalEnv._instance = GlobalEnv._instance, None
    if env is None or env.mesh is None:
        return
    # Whoever still holds the environment or a layer must not keep the process groups alive: see `RankGroup`.
    mesh = env.mesh
    object.__setattr__(env, "mesh", None)
    for group in env.groups.values():
        group.close()
    if env.owns_process_group:
        dist.destroy_process_group()
    else:
        for axis in env.layout.sizes:
            process_group = mesh.get_group(axis)
            if process_group is not dist.group.WORLD:
                dist.destroy_process_group(process_group)
    # Nor must whoever holds the mesh: DTensor's caches do so for good. PyTorch 2.11 has no such attribute.
    getattr(mesh, "_pg_registry", {}).clear()


def under_torchrun() -> bool:
    """Whether a launcher has set the variables of torch.distributed's `env://` start-up."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Ranks in this job, known before torch.distributed is joined."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def local_device(device: str | None) -> torch.device:
    """This rank's device: the CPU, or the CUDA device whose index is the rank's index on its host.

    Raises:
        UserError: CUDA is asked for and absent, or this host has more ranks than devices.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: PyTorch {torch.__version__} finds no CUDA device on this machine. Use --device cpu, or "
            "install a CUDA build of PyTorch and check nvidia-smi."
        )
    index, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= devices:
        raise UserError(
            f"--device cuda: this host runs a rank with local index {index} but has {devices} CUDA "
            f"device{'s' if devices > 1 else ''}; NCCL needs one per rank. Start at most {devices} ranks here."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
