"""Every method at every site of a layer, and what else a plan can say."""

from collections.abc import Iterator

from shiplap.overlap.plan import ColumnPlan, RowPlan

COLUMNS = ["columns", "columns:3,0,1", "tiles:2", "tiles:100"]
COLUMNS_IN_TURNS = ["columns in turns", "tiles:2 in turns"]


def gathers(num_ranks: int) -> list[str]:
    """Chunks that come out uneven, more of them than rows, and groups of all shapes."""
    shards = ["1"] * num_ranks
    groups = [",".join(shards), str(num_ranks), f"1,{num_ranks - 1}", f"{num_ranks - 1},1"]
    if num_ranks == 8:
        groups += ["1,1,2,4", "3,2,3"]
    grouped = ["grouped", *(f"grouped:{sizes}" for sizes in groups)]
    in_turns = ["ring:3 in turns", "grouped in turns", *COLUMNS_IN_TURNS]
    return ["sequential", "ring", "ring:3", "ring:100", *grouped, *COLUMNS, *in_turns]


SCATTERS = [
    "sequential",
    "bulk",
    "direct",
    "reduce",
    "exchange",
    "exchange:3",
    "exchange:100",
    "pieces",
    "pieces:1,1",
    "pieces:5,2,0,9",
    *COLUMNS,
    "direct in turns",
    "exchange:3 in turns",
    *COLUMNS_IN_TURNS,
]


def column_plans(num_ranks: int) -> Iterator[ColumnPlan]:
    """Each method at its site beside the switches' own, and every kept input under every gather."""
    for method in gathers(num_ranks):
        yield ColumnPlan(forward=method, dgrad="bulk", wgrad="bulk")
        yield ColumnPlan(forward=method, dgrad="exchange", wgrad="sequential", keeps="gathered")
        if method != "sequential":
            yield ColumnPlan(forward="ring", dgrad="sequential", wgrad=method)
            yield ColumnPlan(forward="ring", dgrad="exchange:2", wgrad=method)
    for method in SCATTERS:
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="bulk")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="direct")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="direct in turns")
        yield ColumnPlan(forward="ring", dgrad=method, wgrad="sequential")


def row_plans(num_ranks: int) -> Iterator[RowPlan]:
    """Each method at its site."""
    for method in gathers(num_ranks):
        yield RowPlan(forward="exchange", dgrad=method)
        yield RowPlan(forward="exchange", dgrad=method, wgrad="parts")
    for method in SCATTERS:
        yield RowPlan(forward=method, dgrad="ring")
