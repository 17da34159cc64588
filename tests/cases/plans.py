"""Every method at every site of a layer, and what else a plan can say."""

from collections.abc import Iterator

from shiplap.overlap.plan import ColumnPlan, RowPlan

FEATURE_CHUNKS = [
    "feature_chunks",
    "feature_chunks:3,0,1",
    "feature_chunks:2 own_first",
    "feature_chunks:100 own_first",
]
PACED_FEATURE_CHUNKS = ["feature_chunks paced", "feature_chunks:2 own_first paced"]


def gathers(num_ranks: int) -> list[str]:
    """Chunks that come out uneven, more of them than rows, and groups of all shapes."""
    shards = ["1"] * num_ranks
    groups = [",".join(shards), str(num_ranks), f"1,{num_ranks - 1}", f"{num_ranks - 1},1"]
    if num_ranks == 8:
        groups += ["1,1,2,4", "3,2,3"]
    groups_of = ["shards_per_gemm", *(f"shards_per_gemm:{sizes}" for sizes in groups)]
    paced = ["ring:3 paced", "shards_per_gemm paced", *PACED_FEATURE_CHUNKS]
    return ["sequential", "ring", "ring:3", "ring:100", *groups_of, *FEATURE_CHUNKS, *paced]


SCATTERS = [
    "sequential",
    "bulk",
    "bulk_p2p",
    "reduce",
    "p2p",
    "p2p:3",
    "p2p:100",
    "row_chunks",
    "row_chunks:1,1",
    "row_chunks:5,2,0,9",
    *FEATURE_CHUNKS,
    "bulk_p2p paced",
    "p2p:3 paced",
    *PACED_FEATURE_CHUNKS,
]


def column_plans(num_ranks: int) -> Iterator[ColumnPlan]:
    """Each method at its site beside the switches' own, and every kept input under every gather."""
    for method in gathers(num_ranks):
        yield ColumnPlan(forward=method, dgrad="bulk", wgrad="bulk")
        yield ColumnPlan(forward=method, dgrad="p2p", wgrad="sequential", keeps="gathered")
        if method != "sequential":
            yield ColumnPlan(forward="ring", dgrad="sequential", wgrad=method)
            yield ColumnPlan(forward="ring", dgrad="p2p:2", wgrad=method)
    for method in SCATTERS:
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="bulk")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="bulk_p2p")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="bulk_p2p paced")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="sequential")


def row_plans(num_ranks: int) -> Iterator[RowPlan]:
    """Each method at its site."""
    for method in gathers(num_ranks):
        yield RowPlan(forward="p2p", dgrad=method)
        yield RowPlan(forward="p2p", dgrad=method, wgrad="parts")
    for method in SCATTERS:
        yield RowPlan(forward=method, dgrad="ring")
