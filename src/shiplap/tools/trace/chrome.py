"""The trace file, for https://ui.perfetto.dev and chrome://tracing: Chrome's trace event format, in JSON.

A process is a rank, and a thread is a lane. Slices of a lane that overlap without one being inside the other, such as
two communications under way at once, are put in lanes of their own beneath it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shiplap.tools.trace.slices import RankTrace, Slice
from shiplap.tools.trace.spans import LANES


def chrome_trace(ranks: Sequence[RankTrace], names: Sequence[str], notes: Mapping[str, object]) -> dict[str, Any]:
    """The content of the file; times begin with the first slice.

    Args:
        ranks: what each rank recorded, by one clock.
        names: what each rank is called.
        notes: what else is worth knowing.
    """
    start_ns = min((item.begin_ns for rank in ranks for item in rank.slices), default=0)
    events = [
        event
        for number, (rank, name) in enumerate(zip(ranks, names, strict=True))
        for event in _events_of(number, rank, name, start_ns=start_ns)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(notes)}


def _events_of(rank: int, trace: RankTrace, name: str, *, start_ns: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for place, lane in enumerate(LANES):
        for number, slices in enumerate(in_lanes(item for item in trace.slices if item.lane == lane)):
            thread = 10_000 * rank + 100 * place + number + 1
            label = lane if number == 0 else f"{lane} ({number + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": label}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
            for item in slices:
                yield {
                    "ph": "X",
                    "name": item.name,
                    "cat": lane,
                    "pid": rank,
                    "tid": thread,
                    "ts": (item.begin_ns - start_ns) / 1000,
                    "dur": (item.end_ns - item.begin_ns) / 1000,
                    "args": _arguments(item),
                }


def _arguments(item: Slice) -> dict[str, object]:
    named = {
        "step": item.step,
        "layer": item.layer,
        "site": item.site,
        "method": item.method,
        "collective": item.collective,
        "bytes": item.num_bytes,
        "kernel": item.kernel,
    }
    return {name: value for name, value in named.items() if value}


def in_lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """As few lanes as it takes, in which slices follow each other or are one inside the other."""
    lanes: list[list[Slice]] = []
    open_until: list[list[int]] = []
    for item in sorted(slices, key=lambda item: (item.begin_ns, -item.end_ns)):
        for lane, ends in zip(lanes, open_until, strict=True):
            while ends and ends[-1] <= item.begin_ns:
                ends.pop()
            if not ends or item.end_ns <= ends[-1]:
                lane.append(item)
                ends.append(item.end_ns)
                break
        else:
            lanes.append([item])
            open_until.append([item.end_ns])
    return lanes
