"""Exposed communication as a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shiplap.tools.trace.exposure import Row, StepExposure

_EXPOSED, _HIDDEN, _REST = "#c8442c", "#9cc3d5", "#e4e2dc"
_INK, _FAINT = "#2b2b2b", "#767676"
_MEANINGS = (
    (_EXPOSED, "exposed: the rank waits for it"),
    (_HIDDEN, "hidden: under way while the rank does something else"),
    (_REST, "the rest of the step"),
)
_ROW_INCHES, _AROUND_INCHES = 0.29, 0.95


def draw(path: Path, rows: Sequence[Row], steps: Sequence[StepExposure], *, title: str) -> None:
    """Draw both: by layer and site in the mean over ranks and steps, and by step in the mean over ranks.

    Args:
        path: of the PNG file.
        rows: the sites; without any, only the steps are drawn.
        steps: of every rank.
        title: of the whole.
    """
    places = _places(rows)
    num_steps = len({item.step for item in steps})
    heights = [_ROW_INCHES * size for size in ([places[-1] + 1] if rows else []) + [num_steps]]
    size = (12, 0.9 + _AROUND_INCHES * len(heights) + sum(heights))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14.5, color=_INK)
    figure.legend(
        handles=[Patch(color=color, label=meaning) for color, meaning in _MEANINGS],
        loc="outside lower center",
        ncols=len(_MEANINGS),
        fontsize=10.5,
        frameon=False,
    )
    *of_sites, of_steps = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes in of_sites:
        _draw_sites(axes, rows, places)
    _draw_steps(of_steps, steps)
    figure.savefig(path)


def _places(rows: Sequence[Row]) -> list[float]:
    """Where each row stands, in rows: layers are a little apart."""
    places: list[float] = []
    for number, row in enumerate(rows):
        is_next_layer = number > 0 and rows[number - 1].layer != row.layer
        places.append(places[-1] + (1.4 if is_next_layer else 1.0) if places else 0.0)
    return places


def _draw_sites(axes: Axes, rows: Sequence[Row], places: Sequence[float]) -> None:
    exposed = [row.exposed_ms for row in rows]
    hidden = [max(0.0, row.communication_ms - row.exposed_ms) for row in rows]
    axes.barh(places, exposed, height=0.78, color=_EXPOSED)
    axes.barh(places, hidden, left=exposed, height=0.78, color=_HIDDEN)
    notes = [f"{row.exposed_ms:.2f} ms exposed, {row.hidden_percent:.0f} % hidden" for row in rows]
    _finish(axes, places, [_label(rows, number) for number in range(len(rows))], notes=notes)
    axes.set_xlabel("ms a step, mean over ranks and steps", fontsize=11.5)
    axes.set_title("Communication by layer and site", fontsize=12.5, loc="left", color=_INK)


def _label(rows: Sequence[Row], number: int) -> str:
    row = rows[number]
    is_first = number == 0 or rows[number - 1].layer != row.layer
    name = row.layer if row.num_layers == 1 else f"{row.layer} × {row.num_layers}"
    site = f"{row.site} {row.method}".strip()
    return f"{name if is_first else ''}  {site:<22}"


def _draw_steps(axes: Axes, steps: Sequence[StepExposure]) -> None:
    numbers = sorted({item.step for item in steps})
    whole = [fmean(item.step_ms for item in steps if item.step == number) for number in numbers]
    exposed = [fmean(item.exposed_ms for item in steps if item.step == number) for number in numbers]
    places = list(map(float, range(len(numbers))))
    axes.barh(places, exposed, height=0.78, color=_EXPOSED)
    rest = [of - ms for ms, of in zip(exposed, whole, strict=True)]
    axes.barh(places, rest, left=exposed, height=0.78, color=_REST)
    notes = [f"{ms:.1f} of {of:.1f} ms exposed, {100 * ms / of:.0f} %" for ms, of in zip(exposed, whole, strict=True)]
    _finish(axes, places, [f"step {number}  " for number in numbers], notes=notes)
    axes.set_xlabel("ms, mean over ranks", fontsize=11.5)
    axes.set_title("Steps", fontsize=12.5, loc="left", color=_INK)


def _finish(axes: Axes, places: Sequence[float], labels: Sequence[str], *, notes: Sequence[str]) -> None:
    """Labels on the left, numbers behind the bars, and no frame that says nothing."""
    ends = [0.0] * len(places)
    for container in axes.containers:
        ends = [end + bar.get_width() for end, bar in zip(ends, container, strict=True)]
    longest = max(ends) or 1.0
    for place, end, note in zip(places, ends, notes, strict=True):
        axes.text(end + 0.008 * longest, place, note, va="center", fontsize=10, color=_FAINT)
    axes.set_yticks(places, labels, fontsize=10.5, family="monospace")
    axes.set_ylim(places[-1] + 0.6, -0.6)
    # Room for the longest bar's numbers.
    axes.set_xlim(0, 1.45 * longest)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK, labelsize=10.5)
    axes.grid(axis="x", alpha=0.35)
    axes.set_axisbelow(True)
