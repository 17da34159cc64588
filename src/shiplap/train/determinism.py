"""`--deterministic`: a run that is started twice alike gives the same bits twice, with all overlap on.

What overlaps never decides a bit: who adds to whom in which order is fixed by the plan, whatever arrives first
(`shiplap.overlap.primitives`). What could decide one is below it, and is settled here:

- PyTorch's operators, in its own deterministic mode: of two kernels it takes the one with a fixed order, and an
  operator that has none raises. On CUDA that concerns the backward of attention, of `topk` and of indexing, and the
  cross-entropy's `scatter_add_`, whose indices never meet; on the CPU the backward of indexing, whose threads would
  add in any order. Attention needs no choice of ours: flash and memory-efficient have a backward of fixed order in
  this mode, and cuDNN's is not taken (PyTorch's `sdp_utils.cpp` and `attention_backward.cu`).
- cuBLAS, where several streams compute at once: it needs a workspace of fixed size for each.
- NCCL's sums in the switches (NVLink SHARP, and SHARP over InfiniBand): their order is the switch's. Which algorithm
  of the others NCCL takes follows from the message's size, the ranks and the topology, not from measured time, so none
  is prescribed. The overlap methods' own messages are copies, which have no order.

Gloo needs nothing: its algorithm follows from the message's size and the ranks.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shiplap.config import UserError
from shiplap.config.train import RunOptions

_ON_CUDA: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "NCCL_COLLNET_ENABLE": ("0",),
}
"""Environment variables with the values under which results repeat; the first is taken where nothing is set.

cuBLAS's manual names the first variable and its two values under "Results reproducibility". PyTorch reads it at a
process's first matrix product, and in deterministic mode raises for any other value; `:4096:8` is 32 MiB a stream,
which it takes on Hopper anyway. NVLink SHARP sums in an order that differs from call to call (NVIDIA/nccl issue 1497);
PyTorch leaves it out for that reason, but only in process groups that are made in deterministic mode. NCCL reads its
variables when a process makes its first communicator."""


def check_environment(options: RunOptions) -> None:
    """Refuse `--deterministic` where the environment asks for what does not repeat.

    Raises:
        UserError: naming the variable, its value and those that would do.
    """
    if not options.deterministic or options.device != "cuda":
        return
    for name, values in _ON_CUDA.items():
        value = os.environ.get(name, values[0])
        if value not in values:
            raise UserError(
                f"--deterministic: the environment has {name}={value}, under which results need not repeat; they do "
                f"with {' or '.join(values)}. Unset it, or drop --deterministic."
            )


@contextmanager
def reproducible(options: RunOptions) -> Iterator[None]:
    """Compute in a fixed order while inside, if `--deterministic` asks for it.

    Must be entered before the process's first product on CUDA and its first NCCL communicator, which read the
    environment once. After a product without the variable, PyTorch raises at the first one inside.

    What was set before is put back; an environment that a library has read stays read.
    """
    if not options.deterministic:
        yield
        return
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is a property of the module's class, unknown to mypy
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    added = [name for name in _ON_CUDA if options.device == "cuda" and name not in os.environ]
    os.environ.update({name: _ON_CUDA[name][0] for name in added})
    # With `warn_only`, PyTorch takes the kernels without a fixed order.
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Filling what is allocated would show as one more pass over every output. Nothing here reads memory that it has not
    # written: tests/distributed/test_deterministic.py trains with it filled, to the same bits.
    memory.fill_uninitialized_memory = False
    # Else cuDNN may choose by measured time. None of our operators is its own in this mode; a user's layer may be.
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
        for name in added:
            os.environ.pop(name, None)
