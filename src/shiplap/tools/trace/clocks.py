"""One clock for all ranks: `time.perf_counter_ns` of the first rank's host.

Ranks of one host share that clock. Those of other hosts are compared at a handshake: all ranks leave it within the time
that a message takes, so the difference between two clocks is known to about that.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import node
from statistics import median

from shiplap.dist.agreement import gather_texts

_NUM_HANDSHAKES = 11


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """How far the clocks of all ranks are from the first one's.

    Attributes:
        offsets_ns: by rank; 0 on the first rank's host.
        num_hosts: that the ranks run on.
        uncertainty_ns: half of how far the handshakes are apart; 0 on one host.
    """

    offsets_ns: Sequence[int]
    num_hosts: int
    uncertainty_ns: int

    def in_words(self) -> str:
        """How the ranks' times compare."""
        if self.num_hosts == 1:
            return "all ranks run on one host and share its clock"
        return (
            f"the clocks of {self.num_hosts} hosts were aligned at a handshake, to about "
            f"{self.uncertainty_ns / 1000:.0f} µs"
        )


def compare_clocks() -> Clocks:
    """Ask all ranks, which must call this together."""
    stamps = []
    for _ in range(_NUM_HANDSHAKES):
        gather_texts("")
        stamps.append(time.perf_counter_ns())
    said = [json.loads(text) for text in gather_texts(json.dumps({"host": _host(), "stamps": stamps}))]
    return clocks_of([answer["host"] for answer in said], [answer["stamps"] for answer in said])


def clocks_of(hosts: Sequence[str], stamps: Sequence[Sequence[int]]) -> Clocks:
    """From the host of each rank, and the times at which it left each handshake."""
    offsets: dict[str, int] = {hosts[0]: 0}
    spreads = [0]
    for host in dict.fromkeys(hosts):
        if host != hosts[0]:
            differences = [own - first for own, first in zip(stamps[hosts.index(host)], stamps[0], strict=True)]
            offsets[host] = round(median(differences))
            spreads.append((max(differences) - min(differences)) // 2)
    return Clocks(offsets_ns=[offsets[host] for host in hosts], num_hosts=len(offsets), uncertainty_ns=max(spreads))


def _host() -> str:
    """What ranks have in common whose clock is the same: on Linux the kernel's start."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else node()
