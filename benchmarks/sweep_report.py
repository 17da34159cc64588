"""Tables and a figure of what `sweep.py` measured.

.venv/bin/python benchmarks/sweep_report.py sweep-tp2.jsonl sweep-tp4.jsonl --output docs/figures/sweep.png
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]
_NOTHING_TO_HIDE = 0.03
"""Of the sequential time: less than this is noise, and so is a fraction of it."""
VARIANTS = {"plan": ("measured plan", "#0b7285", "o"), "switches": ("default switches", "#74b816", "v")}
VARIANTS["DTensor"] = ("DTensor", "0.45", "s")


def per_round(record: Record, name: str, to: str) -> list[float]:
    """How many times faster one variant is than another, of each round."""
    times = record["times_ms"]
    return [b / a for a, b in zip(times[name], times[to], strict=True)]


def median(record: Record, name: str) -> float:
    """Milliseconds of a variant."""
    times: list[float] = record["times_ms"][name]
    return statistics.median(times)


def ideal(record: Record) -> float:
    """The larger of products and communication, the latter in the faster of the two ways that were measured."""
    communication = min(median(record, "communication"), median(record, "communication, plan"))
    return max(median(record, "products"), communication)


def hidden(record: Record, name: str = "plan") -> float | None:
    """What part of the time that could be hidden is hidden; None where there is nothing to speak of."""
    sequential = median(record, "sequential")
    to_hide = sequential - ideal(record)
    if to_hide < _NOTHING_TO_HIDE * sequential:
        return None
    return (sequential - median(record, name)) / to_hide


def link_of(record: Record) -> str:
    """Such as `354 Mbit/s`."""
    return f"{record['link_bits_per_s'] / 1e6:g} Mbit/s" if record["link_bits_per_s"] else "no limit"


def ratio_of(records: Sequence[Record]) -> float:
    """Communication over products, the median of some shapes."""
    return statistics.median(median(record, "communication") / median(record, "products") for record in records)


def shape_of(record: Record) -> str:
    """Such as `S=512, H=512, F=2176`."""
    ffn = f", F={record['ffn']}" if record["ffn"] else ""
    return f"S={record['sequence']}, H={record['hidden']}{ffn}"


def speed_table(records: Sequence[Record]) -> str:
    """A shape a line, in Markdown."""
    lines = [
        "| link | part | shape | comm/products | sequential, ms | plan against it (quartiles) | hidden | DTensor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        low, middle, high = statistics.quantiles(per_round(record, "plan", "sequential"), n=4)
        part = hidden(record)
        lines.append(
            f"| {link_of(record)} | {record['part']} | {shape_of(record)} "
            f"| {median(record, 'communication') / median(record, 'products'):.2f} "
            f"| {median(record, 'sequential'):.1f} | {middle:.2f}× ({low:.2f} … {high:.2f}) "
            f"| {'–' if part is None else f'{part:.0%}'} "
            f"| {statistics.median(per_round(record, 'plan', 'DTensor')):.2f}× |"
        )
    return "\n".join(lines)


def kept_table(records: Sequence[Record]) -> str:
    """What keeping only the shard costs, by link, in Markdown: medians over the shapes of each."""
    lines = [
        "| part | link | kept for backward, shard → gathered | gathered is faster, sequential | overlapped |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["part"], link_of(record)), []).append(record)
    for (part, link), group in groups.items():
        largest = max(group, key=lambda record: record["sequence"])
        sequential = [statistics.median(per_round(r, "sequential, kept", "sequential")) for r in group]
        overlapped = [statistics.median(per_round(r, "plan, kept", "plan")) for r in group]
        lines.append(
            f"| {part} | {link} | {largest['kept_bytes_shard'] / 2**20:.1f} → "
            f"{largest['kept_bytes_gathered'] / 2**20:.1f} MiB ({shape_of(largest)}) "
            f"| {_range(sequential)} | {_range(overlapped)} |"
        )
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}× ({min(values):.2f} … {max(values):.2f})"


def summary(records: Sequence[Record]) -> str:
    """The smallest speed-up, and what is hidden at each nominal ratio."""
    speedups = [statistics.median(per_round(record, "plan", "sequential")) for record in records]
    worst = min(range(len(records)), key=lambda i: speedups[i])
    lines = [
        f"{len(records)} shapes; plan against sequential: smallest {speedups[worst]:.3f}× ({records[worst]['part']} "
        f"{shape_of(records[worst])}), median {statistics.median(speedups):.2f}×, largest {max(speedups):.2f}×"
    ]
    for link in dict.fromkeys(map(link_of, records)):
        group = [record for record in records if link_of(record) == link]
        parts = [part for part in map(hidden, group) if part is not None]
        against = [statistics.median(per_round(record, "plan", "DTensor")) for record in group]
        text = (
            f"median {statistics.median(parts):.0%}, {min(parts):.0%} … {max(parts):.0%}"
            if parts
            else "nothing to hide"
        )
        lines.append(f"{link}, comm/products {ratio_of(group):.2f}: hidden {text}; against DTensor {_range(against)}")
    return "\n".join(lines)


def draw(axes: Axes, records: Sequence[Record]) -> None:
    """A shape a column: how many times as fast as sequential each variant is, and what the ideal would be."""
    for offset, (name, (label, color, marker)) in enumerate(VARIANTS.items()):
        for number, record in enumerate(records):
            low, middle, high = statistics.quantiles(per_round(record, name, "sequential"), n=4)
            axes.errorbar(
                number + 0.22 * (offset - 1),
                middle,
                yerr=[[middle - low], [high - middle]],
                color=color,
                marker=marker,
                markersize=5,
                linewidth=1.2,
                label="" if number else label,
            )
    for number, record in enumerate(records):
        bound = median(record, "sequential") / ideal(record)
        label = "" if number else "all hidden"
        axes.hlines(bound, number - 0.4, number + 0.4, color="tab:red", linewidth=1.5, label=label)
    axes.axhline(1.0, color="0.3", linewidth=1, linestyle="--")
    links = [link_of(record) for record in records]
    for number in range(1, len(records)):
        if links[number] != links[number - 1]:
            axes.axvline(number - 0.5, color="0.85", linewidth=1)
    axes.set_xticks(range(len(records)), [f"S={record['sequence']}" for record in records], rotation=60, fontsize=8)
    top = axes.secondary_xaxis("top")
    groups = {link: [i for i in range(len(records)) if links[i] == link] for link in dict.fromkeys(links)}
    top.set_xticks(
        [statistics.mean(numbers) for numbers in groups.values()],
        [f"{link}\ncomm/\nproducts\n{ratio_of([records[i] for i in numbers]):.1f}" for link, numbers in groups.items()],
        fontsize=8,
    )
    top.tick_params(length=0)


def main() -> None:
    """A row of panels a file, a panel a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what sweep.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    arguments = parser.parse_args()
    figure = Figure(figsize=(14, 4.6 * len(arguments.records)), layout="constrained")
    grid = figure.subplots(len(arguments.records), 2, squeeze=False, sharey="row")
    for row, path in zip(grid, arguments.records, strict=True):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        records.sort(key=lambda record: (record["part"], -(record["link_bits_per_s"] or 0), record["sequence"]))
        size = records[0]["tensor_parallel_size"]
        where = f"TP {size} on {size} hosts"
        print(f"## {where}\n\n{summary(records)}\n\n{speed_table(records)}\n\n{kept_table(records)}\n")
        for axes, part in zip(row, ("mlp", "attention"), strict=True):
            draw(axes, [record for record in records if record["part"] == part])
            axes.set_title(f"{'MLP' if part == 'mlp' else 'attention'}, {where}", pad=58)
        row[0].set_ylabel("times as fast as sequential")
        row[0].legend(loc="upper left", fontsize=8)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
