"""Start local workers through PyTorch's elastic launcher, and be one of them."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shiplap.config.option import UserError
from shiplap.config.parallel import ModelParallelConfig
from shiplap.dist.environment import (
    GlobalEnv,
    destroy_all_env,
    init_all_env,
    local_device,
    under_torchrun,
    world_size,
)
from shiplap.dist.agreement import AgreedError, check_same_everywhere, fail_together
from shiplap.dist.axes import layout_for

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those for which the elastic launcher installs handlers of its own."""


class WorkerError(Exception):
    """A worker stopped before its work was done.

    Attributes:
        rank: the worker that failed first.
        exit_code: what the parent should exit with; 128 + N after signal N, as in a shell.
        has_raised: whether it ended in an exception, rather than with an exit code of its own choice.
    """

    def __init__(self, rank: int, exit_code: int, *, has_raised: bool = True) -> None:
        """Taken from the process's exit code, negative after a signal."""
        how = f"exit code {exit_code}" if exit_code > 0 else f"killed by {signal.Signals(-exit_code).name}"
        super().__init__(f"rank {rank} failed ({how}); the other ranks were stopped.")
        self.rank = rank
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code
        self.has_raised = has_raised


def check_devices(device: str, num_workers: int) -> None:
    """Refuse to start more workers here than there are CUDA devices. Leaves the devices alone.

    Raises:
        UserError: naming both numbers.
    """
    num_devices = torch.cuda.device_count()
    if device == "cuda" and num_devices < num_workers:
        raise UserError(
            f"--device cuda: PyTorch {torch.__version__} finds {num_devices} CUDA "
            f"device{'' if num_devices == 1 else 's'} on this machine, but {num_workers} workers need one each. "
            "Use --device cpu, or fewer ranks, or check nvidia-smi."
        )


def start_workers(argv: Sequence[str], num_workers: int) -> None:
    """Run `shiplap ARGV` in so many local processes, as `torchrun` would, and wait for them.

    If one fails, or this process is told to stop, all are stopped. The port is free when it is chosen. The workers
    write to this process's own output.

    Args:
        argv: the arguments after `shiplap`.
        num_workers: how many processes.

    Raises:
        WorkerError: a worker failed.
        KeyboardInterrupt: this process was interrupted.
        SystemExit: this process was told to terminate.
    """
    with tempfile.TemporaryDirectory(prefix="shiplap-") as error_files, _own_signal_handlers(), _quiet_launcher():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=Path(error_files).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=error_files),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shiplap", *argv)
        except ChildFailedError as error:
            rank, failure = first_failure(error)
            has_raised = Path(failure.error_file).is_file()
            raise WorkerError(rank, failure.exitcode, has_raised=has_raised) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed by itself, rather than because another one had gone.

    The launcher's own time stamps are whole seconds, and ranks that lose their peer fail within milliseconds.
    So: first those that a signal killed; then by the time at which they wrote down their error; then those that wrote
    nothing; last those that the launcher itself told to stop.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        failure = item[1]
        if failure.exitcode < 0:
            return 3 if failure.exitcode == -signal.SIGTERM else 0, 0
        written = Path(failure.error_file)
        return (1, written.stat().st_mtime_ns) if written.is_file() else (2, 0)

    return min(error.failures.items(), key=order)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put this process's signal handlers back afterwards."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Log nothing: this process only waits, and the launcher logs about what it also raises."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


@contextmanager
def joined_world(device: str) -> Iterator[None]:
    """Be one rank of the job that a launcher started, while inside. Nothing, where no launcher did.

    Ranks that come to the end leave together, so that none is stopped by the launcher, which does so when another
    has failed, before it has said why.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        UserError: this rank has no CUDA device; the others don't know of it.
    """
    if not under_torchrun() or dist.is_initialized():
        yield
        return
    _share_cores()
    this_device = local_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if this_device.type == "cuda" else "gloo")
    try:
        yield
    except BaseException as error:
        # The other ranks may be waiting for this one, so leaving properly could wait for them in turn. This process
        # ends instead, and the launcher ends the others.
        get_error_handler().record_exception(error)
        raise
    # A collective of the CPU that waits for all; `barrier` would want to know the CUDA device.
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


@contextmanager
def agreed_env(config: ModelParallelConfig, *, device: str, settings: Mapping[str, object]) -> Iterator[GlobalEnv]:
    """Agree with the other ranks, and lay them out while inside.

    Args:
        config: the topology.
        device: `cpu` or `cuda`.
        settings: what all ranks must have been started with alike.

    Raises:
        AgreedError: on every rank, if the settings differ, or the world size does not fit the topology.
    """
    # Before the process groups are made, which would wait for a rank that makes others.
    check_same_everywhere(settings)
    with fail_together():
        layout_for(config, world_size())
    env = init_all_env(config, device=device)
    try:
        yield env
    except AgreedError:
        destroy_all_env()
        raise
    except BaseException:
        # With other ranks in the middle of something, see `joined_world`.
        if env.mesh is None:
            destroy_all_env()
        raise
    destroy_all_env()


def _share_cores() -> None:
    """Divide this host's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        num_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks_here))
