"""How the results are shown: a table of text, or a JSON file."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from shiplap.config.option import UserError
from shiplap.tools.verify.verdict import Row

_MOST_FAILURES_A_ROW = 3
_LEGEND = """\
Output and every gradient against the unsharded layer in float64; error: norm of the difference over the norm.
column: the methods of forward/dgrad/wgrad; row: of forward/dgrad; chain: both layers and a residual, used twice, over
two micro-batches. Same bits: as without overlap, and as a second time; if not, by how much, in which tensors.
"""


class Table:
    """Lines of text, as the rows come."""

    def __init__(self, names: Iterable[str]) -> None:
        """For rows of these names."""
        self._width = max(map(len, names))

    def header(self) -> str:
        """What stands above the rows."""
        return f"{_LEGEND}\n{self._line('', 'dtype', 'cases', 'error', 'at most', 'as sequential', 'repeated', '')}"

    def row(self, row: Row) -> str:
        """One row, and below it its first failures."""
        line = self._line(
            row.name,
            row.dtype,
            str(row.num_cases),
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            _same_bits(row.off_sequential),
            _same_bits(row.off_repeat),
            "PASS" if row.passed else "FAIL",
        )
        lines = [line, *(f"    {failure}" for failure in row.failures[:_MOST_FAILURES_A_ROW])]
        if len(row.failures) > _MOST_FAILURES_A_ROW:
            lines.append(f"    … and {len(row.failures) - _MOST_FAILURES_A_ROW} more; --json FILE has all of them")
        return "\n".join(lines)

    def _line(self, name: str, *cells: str) -> str:
        dtype, cases, error, tolerance, sequential, repeated, verdict = cells
        text = f"{name:<{self._width}}  {dtype:<8}  {cases:>5}  {error:>7}  {tolerance:>7}"
        return f"{text}  {sequential:<30}  {repeated:<8}  {verdict}".rstrip()


def _same_bits(differences: Mapping[str, float] | None) -> str:
    if differences is None:
        return "–"
    off = {name: difference for name, difference in differences.items() if difference}
    if not off:
        return "yes"
    return f"no: {' '.join(off)} {max(off.values()):.0e}"


def check_writable(path: str | None) -> None:
    """Refuse a file that cannot be written, before the work; what is in it stays for now.

    Raises:
        UserError: naming the flag and the file.
    """
    if path is not None:
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise UserError(f"--json {path}: {error.strerror}.") from None


def write_json(path: str, rows: Iterable[Row], job: Mapping[str, object]) -> None:
    """Write all rows with all failures. A number that is not finite is null there.

    Args:
        path: of the file, which is replaced.
        rows: of the table.
        job: what was run on, by name.

    Raises:
        UserError: the file cannot be written any more.
    """
    by_name = [asdict(row) | {"passed": row.passed} for row in rows]
    text = json.dumps({**job, "passed": all(row.passed for row in rows), "rows": _finite(by_name)}, indent=2)
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}.") from None


def _finite(value: object) -> object:
    """The same without infinite numbers, which JSON does not have."""
    match value:
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value
