"""What a run shows on a terminal: a progress bar, with everything else above it."""

from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shiplap.train.console import PlainLines


class ProgressBar(PlainLines):
    """The numbers of the latest step beside a bar."""

    def __init__(self, num_steps: int, folder: Path) -> None:
        """The bar appears with the first step."""
        super().__init__(num_steps, folder)
        # In this order and form all of it fits into 80 columns; the bar takes what is left.
        text, remaining = TextColumn("{task.description}", markup=False), TimeRemainingColumn(compact=True)
        self._progress = Progress(text, remaining, BarColumn())
        self._task = self._progress.add_task("", total=num_steps)

    def say(self, text: str) -> None:
        """Show text above the bar, as it is: samples are full of brackets, which rich would take for markup."""
        self._progress.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def show_step(self, line: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, advance=1, description=line)
        self._progress.start()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()
