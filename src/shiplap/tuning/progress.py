"""Shows how far measuring is: a bar on a terminal, elsewhere a line for each tenth."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shiplap.tuning.tune import Progress

_logger = logging.getLogger(__name__)


@contextmanager
def showing_progress(title: str, *, is_shown: bool) -> Iterator[Progress]:
    """Show what is said inside, on standard error.

    Args:
        title: what is being done.
        is_shown: on one rank only.
    """
    if not is_shown:
        yield lambda fraction, text: None
        return
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            pass  # It is for the eye only; lines say the same.
        else:
            text = TextColumn("{task.description}", markup=False)
            columns = (TextColumn(title), BarColumn(), TimeRemainingColumn(compact=True), text)
            with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=1.0)
                yield lambda fraction, text: bar.update(task, completed=fraction, description=text)
            return
    shown = -1

    def show(fraction: float, text: str) -> None:
        nonlocal shown
        if int(10 * fraction) > shown:
            shown = int(10 * fraction)
            _logger.info("%s: %3.0f %%, %s", title, 100 * fraction, text)

    yield show
