"""What was measured as a picture: how long everything takes against no overlap, and the bound of what overlap can."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from shiplap.tools.bench.result import Result
from shiplap.tools.bench.subject import FASTEST, MEASURED, PRODUCTS, SEQUENTIAL, SWITCHES

_COLORS = {
    SEQUENTIAL: "#b9b6ae",
    SWITCHES: "#6ba3be",
    MEASURED: "#1f6f8b",
    FASTEST: "#3d8b5f",
}
_LABELS = {
    SEQUENTIAL: "nothing overlapped",
    SWITCHES: "the switches' plan",
    MEASURED: "the measured plan",
    FASTEST: "the fastest methods",
}
_PEERS = ("#c9a227", "#8f6bb3", "#b0653a")
_BOUND, _INK, _FAINT = "#c8442c", "#2b2b2b", "#6f6f6f"
_BAR_INCHES, _AROUND_INCHES, _GAP = 0.235, 1.0, 0.75
_LONGEST = 2.0
"""Where the axis ends at the latest. What is longer is drawn that long, and its note says how long it is."""


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """One variant of a subject.

    Attributes:
        at: its place, in bars.
        length: its time over that of nothing overlapped.
        low: its lower quartile over that, and so on.
        high: the upper one.
        color: of it.
        note: what is written behind it.
    """

    at: float
    length: float
    low: float
    high: float
    color: str
    note: str


def draw(path: Path, results: Sequence[Result], *, title: str, subtitle: str) -> None:
    """Draw the parts, and below them the passes of the layers.

    Args:
        path: of the PNG file.
        results: of all subjects.
        title: of the whole.
        subtitle: below it.
    """
    peers = list(dict.fromkeys(peer for result in results for peer in result.subject.peers))
    colors = _COLORS | dict(zip(peers, _PEERS, strict=False))
    panels = [
        (heading, [result for result in results if result.subject.what == what])
        for what, heading in (("part", "Parts of a block, forward + backward"), ("layer", "Layers, pass by pass"))
    ]
    panels = [(heading, own) for heading, own in panels if own]
    heights = [sum(len(_shown(result)) + _GAP for result in own) * _BAR_INCHES for _, own in panels]
    size = (13, 1.1 + _AROUND_INCHES * len(panels) + sum(heights))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n{subtitle}", fontsize=13.5, color=_INK)
    used = list(dict.fromkeys(key for result in results for key, _ in _shown(result)))
    figure.legend(
        handles=[
            *(Patch(color=colors[key], label=_LABELS.get(key, key)) for key in used),
            Line2D([], [], color=_BOUND, linestyle="--", linewidth=2, label="bound: max(products, communication)"),
        ],
        loc="outside lower center",
        ncols=3 if len(used) > 2 else 4,
        fontsize=10.5,
        frameon=False,
    )
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (heading, own) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, own, colors, heading)
    figure.savefig(path)


def _shown(result: Result) -> list[tuple[str, str]]:
    """What is drawn of a subject, each with the variant that it is. What is the same as one before is left out."""
    chosen = result.subject.chosen
    shown = [(SEQUENTIAL, SEQUENTIAL), *((role, chosen[role]) for role in (SWITCHES, MEASURED) if role in chosen)]
    shown.append((FASTEST, result.fastest))
    kept: dict[str, str] = {}
    for role, name in shown:
        if name not in kept.values():
            kept[role] = name
    return [*kept.items(), *((peer, peer) for peer in result.subject.peers)]


def _draw_panel(axes: Axes, results: Sequence[Result], colors: dict[str, str], heading: str) -> None:
    at, ticks, labels = 0.0, [], []
    bars: list[_Bar] = []
    for result in results:
        shown = _shown(result)
        bars += [_bar(result, name, at=at + number, color=colors[key]) for number, (key, name) in enumerate(shown)]
        ends = [at - 0.5, at + len(shown) - 0.5]
        axes.plot([result.bound] * 2, ends, color=_BOUND, linestyle=(0, (3, 1.5)), linewidth=2)
        ticks.append(at + (len(shown) - 1) / 2)
        labels.append(_label(result))
        at += len(shown) + _GAP
    for bar in bars:
        axes.barh(bar.at, bar.length, height=0.82, color=bar.color)
        axes.plot([bar.low, bar.high], [bar.at, bar.at], color=_INK, linewidth=1.1, alpha=0.7)
        # Beside the axes, one below the other.
        axes.annotate(
            bar.note,
            (1.0, bar.at),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_INK,
            annotation_clip=False,
        )
    axes.set_yticks(ticks, labels, fontsize=10)
    axes.set_ylim(at - _GAP - 0.2, -0.8)
    axes.set_xlim(0, min(1.05 * max([1.1, *(bar.length for bar in bars), *(bar.high for bar in bars)]), _LONGEST))
    axes.set_xlabel("time over that of nothing overlapped: less is better", fontsize=10.5, color=_INK)
    axes.set_title(heading, fontsize=12, loc="left", color=_INK)
    axes.axvline(1.0, color=_FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9.5, colors=_FAINT)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bar(result: Result, name: str, *, at: float, color: str) -> _Bar:
    note = f"{result.median_ms(name):.3g} ms"
    if name == SEQUENTIAL:
        communication = result.median_ms(result.communication)
        note += f": products {result.median_ms(PRODUCTS):.3g}, communication {communication:.3g}"
    else:
        hidden = result.hidden(name)
        note += f", {result.speedup(name):.2f}×" + ("" if hidden is None else f", {100 * hidden:.0f} % hidden")
        is_method = result.subject.what == "layer" and name in result.subject.candidates
        note += f": {result.method(name)}" if is_method else ""
    low, length, high = result.relative(name)
    return _Bar(at=at, length=length, low=low, high=high, color=color, note=note)


def _label(result: Result) -> str:
    subject = result.subject
    return subject.title if subject.what == "part" else f"{subject.title}\n{subject.direction}"
