"""What was measured as text, up to 120 columns wide."""

from collections.abc import Sequence

from shiplap.tools.bench.result import Result
from shiplap.tools.bench.subject import MEASURED, PRODUCTS, SEQUENTIAL, SWITCHES

_LEGEND = """\
ms: medians of the slowest rank's time; ratios: medians of the rounds' ratios to sequential, where nothing overlaps.
hidden: how much of sequential - max(products, communication) is gained; "-" where that is lost in noise.
products: all that is computed, without communication; communication: alone, in the way in which it is fastest."""


def tables(results: Sequence[Result]) -> str:
    """Both: the parts first, as they are what a training step is made of."""
    layers = [result for result in results if result.subject.what == "layer"]
    parts = [result for result in results if result.subject.what == "part"]
    return f"{_LEGEND}\n\n{_part_table(parts)}\n\n{_layer_table(layers)}"


def _part_table(results: Sequence[Result]) -> str:
    """A line for each variant: there may be many peers."""
    rows = [["part, forward + backward", "ms", "quartiles", "speed-up", "hidden"]]
    for result in results:
        subject = result.subject
        rows.append([subject.title + (": forward only" if subject.direction == "forward" else "")])
        own = {PRODUCTS: PRODUCTS, "communication": result.communication, SEQUENTIAL: SEQUENTIAL}
        for title, name in (own | dict(subject.chosen) | {peer: peer for peer in subject.peers}).items():
            low, high = result.quartiles_ms(name)
            gain = ["", ""] if title in own else [f"{result.speedup(name):.2f}×", _hidden(result, name)]
            rows.append([f"  {title}", _ms(result.median_ms(name)), f"{_ms(low)} … {_ms(high)}", *gain])
        rows += [[f"  {peer}: {why_not}"] for peer, why_not in subject.why_not.items()]
    return _aligned(rows)


def _layer_table(results: Sequence[Result]) -> str:
    """A line for each pass; the last columns are about the measured plan, if there is one."""
    has_plan = any(MEASURED in result.subject.chosen for result in results)
    last = MEASURED if has_plan else "fastest of all methods"
    rows = [["layer, pass", PRODUCTS, "communication", SEQUENTIAL, SWITCHES, last, ""]]
    name = ""
    for result in results:
        subject = result.subject
        if subject.title != name:
            name = subject.title
            rows.append([name])
        best = subject.chosen[MEASURED] if has_plan else result.fastest
        rows.append(
            [
                f"  {subject.direction}",
                *(_ms(result.median_ms(alone)) for alone in (PRODUCTS, result.communication, SEQUENTIAL)),
                *(
                    f"{_ms(result.median_ms(n))} {result.speedup(n):.2f}× {_hidden(result, n):>6}"
                    for n in (subject.chosen[SWITCHES], best)
                ),
                _short(result.method(best)),
            ]
        )
    return _aligned(rows)


def _hidden(result: Result, name: str) -> str:
    hidden = result.hidden(name)
    return "-" if hidden is None else f"{100 * hidden:.0f} %"


def _short(method: str) -> str:
    """`exchange/ring` for `dgrad exchange, wgrad ring`."""
    return "/".join(part.rpartition(" ")[2] for part in method.split(", "))


def _ms(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers to the right; a row of one cell is a heading, which has no column."""
    num_columns = max(map(len, rows))
    widths = [max(len(row[column]) for row in rows if len(row) == num_columns) for column in range(num_columns)]
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = [
            # Names at both ends, numbers between them.
            cell.ljust(width) if column == 0 or not rows[0][column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
