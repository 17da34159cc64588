"""Draws what `mlp.py` measured: bars of each variant's median against the best that overlap could reach.

.venv/bin/python benchmarks/figure.py mlp-1gbit.json mlp-200mbit.json --output docs/figures/mlp.png
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

VARIANTS = {
    "sequential": "sequential",
    "DTensor": "DTensor",
    "overlap": "overlap",
    "overlap, rs_dgrad": "and\nrs_dgrad",
    "chunks": "in 4\nchunks",
    "rs_dgrad, kept": "rs_dgrad,\nkept x",
}
COLORS = ("0.6", "0.4", "tab:blue", "#0b7285", "#2b8a3e", "#5c940d")


def draw(axes: Axes, record: dict[str, Any]) -> None:
    """One measurement: a bar a variant with its quartiles, and a line at the larger of products and communication."""
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in record["times_ms"].items()}
    medians = [quartiles[name][1] for name in VARIANTS]
    spread = [[quartiles[name][1] - quartiles[name][0] for name in VARIANTS]]
    spread.append([quartiles[name][2] - quartiles[name][1] for name in VARIANTS])
    bars = axes.bar(list(VARIANTS.values()), medians, yerr=spread, color=COLORS, capsize=4)
    for bar, median in zip(bars, medians, strict=True):
        label = f"{median:.0f} ms\n{medians[0] / median:.2f}×"
        axes.annotate(label, (bar.get_x() + bar.get_width() / 2, 0.04 * max(medians)), ha="center", color="white")
    gemm, comm = quartiles["gemm"][1], min(quartiles["comm"][1], quartiles["exchange"][1])
    best = f"bound: products {gemm:.0f} ms, communication {comm:.0f} ms"
    axes.axhline(max(gemm, comm), color="tab:red", linestyle="--", linewidth=1.5, label=best)
    axes.set_ylim(0, 1.2 * max(medians))
    axes.legend(loc="upper right", fontsize=8)
    axes.set_title(f"{record['link_bits_per_s'] / 1e6:g} Mbit/s, TP {record['tensor_parallel_size']}")
    axes.set_ylabel("forward + backward, ms")
    axes.tick_params(axis="x", labelsize=8)


def main() -> None:
    """One panel a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what mlp.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text()) for path in arguments.records]
    figure = Figure(figsize=(5.4 * len(records), 4), layout="constrained")
    for axes, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True):
        draw(axes, record)
    sizes = f"S={records[0]['sequence']}, H={records[0]['hidden']}, F={records[0]['ffn']}"
    figure.suptitle(f"One MLP ({sizes}, float32): less is better")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=120)


if __name__ == "__main__":
    main()
