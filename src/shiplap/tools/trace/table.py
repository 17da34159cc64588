"""Exposed communication as plain text."""

from collections.abc import Sequence

from shiplap.tools.trace.exposure import Row, StepExposure

_HEADER = ("layer", "site", "method", "under way", "exposed", "hidden", "of the step")
_NUM_WORDS = 3


def exposure_table(rows: Sequence[Row], step: StepExposure) -> str:
    """An aligned table, a line for each site; times in ms of a step.

    Args:
        rows: what to show.
        step: the mean step, for the last line.
    """
    cells = [_HEADER]
    for number, row in enumerate(rows):
        is_first = number == 0 or rows[number - 1].layer != row.layer
        name = row.layer if row.num_layers == 1 else f"{row.layer} × {row.num_layers}"
        cells.append(
            (
                name if is_first else "",
                row.site or "-",
                row.method,
                f"{row.communication_ms:.2f} ms",
                f"{row.exposed_ms:.2f} ms",
                f"{row.hidden_percent:.0f} %",
                f"{100 * row.exposed_ms / step.step_ms:.1f} %",
            )
        )
    hidden = 100 * max(0.0, 1 - step.exposed_ms / step.communication_ms) if step.communication_ms else 0.0
    total = (f"{step.communication_ms:.2f} ms", f"{step.exposed_ms:.2f} ms", f"{hidden:.0f} %")
    cells.append(("all", "", "", *total, f"{step.exposed_percent:.1f} %"))
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < _NUM_WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
