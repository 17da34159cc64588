"""Random numbers that are the same, or different, on the TP ranks.

The TP ranks of a replica are seeded alike, and draw alike: what they all hold whole (activations without sequence
parallelism) is dropped alike. Where each holds a part (heads, or a sequence shard), masks must differ. Inside
`different_per_rank` they come from a generator seeded from the common one and the rank. There is no other state, so
recomputation, which restores the common generator, reproduces them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shiplap.dist.collectives import Group, rank_in

_STRIDE = 0x9E3779B97F4A7C15 >> 3
"""Odd and large, so that neighbouring ranks get seeds that are far apart."""


@contextmanager
def different_per_rank(group: Group, device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside differ between the ranks of the group; those drawn after it are alike again.

    Args:
        group: the TP ranks, seeded alike.
        device: where the random numbers are drawn.
    """
    if group is None:
        yield
        return
    seed = int(torch.randint(2**62, ()).item())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed((seed + rank_in(group) * _STRIDE) % 2**63)
        yield
