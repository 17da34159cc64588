"""Others that do the same with other code, to be timed beside ours: a file each, and its place in `PEERS`.

A peer says why it cannot stand in a part's place, or makes itself into a step of it: `peer` has what it must know.
It starts from our weights, takes our input and our gradient, and what it computes is compared with ours before it is
timed. TransformerEngine or PyTorch's async TP would be further files.
"""

from collections.abc import Mapping

from shiplap.tools.bench.peers.dtensor import DTensorPeer
from shiplap.tools.bench.peers.peer import Copied, Peer, PeerStep, seat

__all__ = ["PEERS", "Copied", "Peer", "PeerStep", "seat"]

PEERS: Mapping[str, Peer] = {"dtensor": DTensorPeer()}
