"""Communication together with the GEMM that uses it or makes it: three primitives, and the methods that do them.

*Gather and consume*: shards `[S/R, …]` of all ranks are gathered; `consume(region, part)` is called for regions of the
whole that together cover it once, as they become available.

*Produce and scatter*: `produce(region, out)` is called for regions of the whole `[S, …]` and writes this rank's partial
result for one into `out`; each rank gets its rows `[S/R, …]` of the sum over the ranks.

*Prefetch*: the gather alone, for a GEMM that comes after the next one.

Methods differ in when they call and in what runs meanwhile, never in the meaning of the result. Each stands in a file
of its own kind; `shiplap.overlap.registry` knows them all. A layer's plan holds its methods, so nothing is looked up
here. Ideas: Wang et al. 2023 (ASPLOS, "Overlap communication with dependent computation via decomposition") for
the pipelines; Korthikanti et al. 2022 for the collectives of sequence parallelism.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from shiplap.dist.collectives import Group, Handle
from shiplap.dist.hooks import record_primitive


@dataclass(frozen=True)
class ShardRows:
    """Rows `start` to `stop` of each of the `num_shards` shards that the sequence consists of."""

    num_shards: int
    start: int
    stop: int


@dataclass(frozen=True)
class Tile:
    """These features, of the last dim, in these rows. Of the same rows tiles come from left to right."""

    rows: slice
    features: slice

    @property
    def is_first(self) -> bool:
        """Whether no features come before these."""
        return self.features == slice(0, self.features.stop)


Rows = slice | ShardRows
Region = Rows | Tile
"""Rows of the sequence, the same rows of every shard, or some features of a range of rows."""
Consume = Callable[[slice | Tile, Tensor], None]
Produce = Callable[[Region, Tensor], None]


def rows_of(region: slice | Tile) -> slice:
    """All rows of a region, whole or not."""
    return region.rows if isinstance(region, Tile) else region


def take(x: Tensor, rows: Rows) -> Tensor:
    """These rows of `x [S, …]`, without a copy: `[n, …]`, or `[shards, n, …]` of several shards."""
    if isinstance(rows, slice):
        return x[rows]
    shards: Tensor = x.unflatten(0, (rows.num_shards, -1))
    return shards[:, rows.start : rows.stop]


class Gather(Protocol):
    """Does *gather and consume* in one way."""

    def __call__(self, x_sBH: Tensor, consume: Consume, *, group: Group, method: "Method") -> Tensor:
        """See `gather_and_consume`."""


class Scatter(Protocol):
    """Does *produce and scatter* in one way."""

    def __call__(self, produce: Produce, shape: torch.Size, *, like: Tensor, group: Group, method: "Method") -> Handle:
        """See `produce_and_scatter`."""


Cut = Literal["whole", "by shard", "by rows", "by features"]
Transport = Literal["none", "collective", "p2p"]
Where = Literal["gather", "gather for wgrad too", "second gather", "scatter", "scatter beside wgrad"]
"""Where candidates are measured: Column's forward and Row's dgrad; Row's dgrad that serves wgrad in parts; Column's
wgrad; Row's forward; Column's dgrad, whose end can hide behind wgrad."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A kind of method, as its own file declares it. Everything else reads this.

    Attributes:
        name: as plans and reports have it.
        cut: the parts in which the GEMM runs.
        transport: of the communication; `none` where nothing is sent.
        summary: a line of the table of methods.
        gather: does *gather and consume*; None if this kind cannot.
        scatter: does *produce and scatter*; None if this kind cannot.
        prefetch: does *prefetch*; None if this kind cannot.
        pieces: the meaning of a method's numbers; empty if it takes none.
        default_pieces: the numbers where a name has none.
        example_pieces: other numbers that are always right, for `shiplap verify`.
        takes_own_first: whether the own rows can be a GEMM of their own, apart from the pieces.
        is_paceable: whether its transfers can follow one another.
        switches: the fields of the configuration that mean this kind's default method.
        old_names: names in plan files of before, each with what it says besides.
        candidates: methods of this kind worth measuring in a place, by the number of ranks.
        overlaps: whether a method has anything to overlap: not if its only GEMM needs everything.
    """

    name: str
    cut: Cut
    transport: Transport
    summary: str
    gather: Gather | None = None
    scatter: Scatter | None = None
    prefetch: Callable[[Tensor, Group], Handle] | None = None
    pieces: str = ""
    default_pieces: tuple[int, ...] = ()
    example_pieces: tuple[int, ...] = ()
    takes_own_first: bool = False
    is_paceable: bool = False
    switches: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()
    candidates: "Callable[[Where, int], Sequence[Method]]" = lambda where, num_ranks: ()
    overlaps: "Callable[[Method], bool]" = lambda method: True

    def method(self, *pieces: int, own_first: bool = False, paced: bool = False) -> "Method":
        """A method of this kind.

        Raises:
            ValueError: this kind does not take such pieces, own rows first, or pacing.
        """
        if pieces and not self.pieces:
            raise ValueError(f"The method {self.name} takes no numbers, got {', '.join(map(str, pieces))}.")
        if pieces and (min(pieces) < 0 or max(pieces) == 0):
            got = ",".join(map(str, pieces))
            raise ValueError(f"The method {self.name} needs numbers from 0 on, not all of them 0, got {got}.")
        if own_first and not self.takes_own_first:
            raise ValueError(f"The method {self.name} cannot have the own rows first.")
        if paced and not self.is_paceable:
            raise ValueError(f"The method {self.name} cannot be paced.")
        return Method(kind=self, pieces=pieces or self.default_pieces, own_first=own_first, paced=paced)

    def __deepcopy__(self, memo: dict[int, object]) -> "Kind":
        """Itself: a copied layer has the same methods."""
        return self


@dataclass(frozen=True, kw_only=True, repr=False)
class Method:
    """One way to overlap: a kind, with what can be chosen of it. Made by `Kind.method`, or from a name.

    Attributes:
        kind: says how the GEMM is cut and how data travels.
        pieces: numbers whose meaning is the kind's.
        own_first: whether the own rows, which need no communication, are a GEMM of their own.
        paced: whether no rank sends to two others at once.
    """

    kind: Kind
    pieces: tuple[int, ...] = ()
    own_first: bool = False
    paced: bool = False

    def __str__(self) -> str:
        """Such as `feature_chunks:1,2,2,3 own_first paced`; numbers are left out where they are the default ones."""
        pieces = "" if self.pieces == self.kind.default_pieces else ":" + ",".join(map(str, self.pieces))
        return self.kind.name + pieces + " own_first" * self.own_first + " paced" * self.paced

    __repr__ = __str__


def gather_and_consume(method: Method, x_sBH: Tensor, consume: Consume, *, group: Group) -> Tensor:
    """Gather `x_sBH [S/R, …]` and hand it to `consume` as it arrives.

    Returns:
        The whole `[S, …]`, for a caller that has another use for it.
    """
    assert method.kind.gather is not None, method
    with record_primitive("gather", method):
        return method.kind.gather(x_sBH, consume, group=_paced(group, method), method=method)


def produce_and_scatter(method: Method, produce: Produce, out_SBH: torch.Size, *, like: Tensor, group: Group) -> Handle:
    """Produce partial results of shape `out_SBH`, and sum them over the ranks into each rank's shard.

    Args:
        method: of the plan.
        produce: writes this rank's partial result for a region.
        out_SBH: shape of the whole result, `[S, …]`; R divides S.
        like: a tensor of the result's dtype and device.
        group: the ranks.

    Returns:
        The shard `[S/R, …]`, which may still be on its way: wait as late as possible.
    """
    assert method.kind.scatter is not None, method
    with record_primitive("scatter", method):
        return method.kind.scatter(produce, out_SBH, like=like, group=_paced(group, method), method=method)


def prefetch(method: Method, x_sBH: Tensor, *, group: Group) -> Handle:
    """Start gathering `x_sBH [S/R, …]` into `[S, …]` for a GEMM that comes after the next one."""
    assert method.kind.prefetch is not None, method
    with record_primitive("prefetch", method):
        return method.kind.prefetch(x_sBH, _paced(group, method))


def _paced(group: Group, method: Method) -> Group:
    return group.paced if method.paced and group is not None else group
