"""Ranks that start once and are used by many tests: importing torch costs more than most tests do."""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# A rank that waits this long for another one has found a hang, not a slow machine.
_HANG = timedelta(minutes=3)


class RankFailedError(AssertionError):
    """A function failed on some rank; the message is its traceback."""


def _serve(rank: int, num_ranks: int, *, store: str, backend: str, commands: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=_HANG)
    while (command := commands.recv()) is not None:
        function, arguments = command
        try:
            commands.send((True, function(*arguments)))
        except BaseException:
            commands.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def shiplap(arguments: Sequence[str], folder: Path | None = None) -> tuple[int, str, str]:
    """Run `shiplap` on this rank as a launcher would, in a folder; exit code, output and errors."""
    from shiplap.commands.main import main

    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, place), contextlib.chdir(folder or Path.cwd()):
        with redirect_stdout(out), redirect_stderr(err):
            code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


class RankPool:
    """So many ranks on this machine, each one thread, in one default process group; Gloo unless said otherwise."""

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._processes: list[BaseProcess] = []
        self._commands: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "shiplap", "shiplap.models.decoder"])
        self._folder = tempfile.TemporaryDirectory(prefix="shiplap-ranks-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            settings = {"store": store, "backend": self._backend, "commands": theirs}
            process = context.Process(target=_serve, args=(rank, self.num_ranks), kwargs=settings, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._commands.append(ours)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on every rank; the results in rank order.

        The function must be importable, and its arguments and result must pickle. If it fails on a rank, all ranks
        are stopped, since the others may wait for that one; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        for commands in self._commands:
            commands.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.num_ranks:
            waiting = [commands for rank, commands in enumerate(self._commands) if rank not in results]
            for ready in multiprocessing.connection.wait(waiting):
                rank = next(rank for rank, commands in enumerate(self._commands) if commands is ready)
                try:
                    passed, result = self._commands[rank].recv()
                except EOFError:
                    passed, result = False, f"rank {rank} died"
                if not passed:
                    self.stop()
                    raise RankFailedError(result)
                results[rank] = result
        return [results[rank] for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for commands in self._commands:
            commands.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._commands = [], []
