"""What a run reports, who listens, and how a terminal shows it."""

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. The names are the keys of `metrics.jsonl`.

    Attributes:
        step: counted from 1.
        train_loss: mean cross-entropy over the tokens of the step, of all ranks; before the update.
        learning_rate: used in this step.
        grad_norm: of the whole model, before clipping.
        step_ms: the whole step, in milliseconds.
        tokens_per_s: over all ranks.
        exposed_tp_comm_ms: in which rank 0 could do nothing but wait for tensor-parallel communication. On CUDA it is
            measured in every tenth step only.
        exposed_tp_comm_percent: of `step_ms`.
        balance_loss: with experts, how evenly they are used: as many as a token takes if evenly, more if not. It is
            added to the cross-entropy with the weight that the configuration says.
        tokens_per_expert: with experts, how many tokens went to each, a list for each layer; of all ranks.
    """

    step: int
    train_loss: float
    learning_rate: float
    grad_norm: float
    step_ms: float
    tokens_per_s: float
    exposed_tp_comm_ms: float | None = None
    exposed_tp_comm_percent: float | None = None
    balance_loss: float | None = None
    tokens_per_expert: list[list[int]] | None = None


class Report:
    """Listens to a run. This one ignores everything."""

    def on_step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation loss after this many steps."""

    def on_sample(self, step: int, text: str) -> None:
        """What the model writes after this many steps."""

    def on_save(self, step: int, folder: Path) -> None:
        """Model or adapters after this many steps are in this folder."""

    def on_success(self) -> None:
        """All steps are done."""

    def close(self) -> None:
        """Nothing more comes, whether or not all steps are done."""


class PlainLines(Report):
    """A line for some of the steps on standard output, and a summary at the end."""

    def __init__(self, num_steps: int, folder: Path, *, log_every: int) -> None:
        """Show the first, each `log_every`-th and the last of `num_steps` steps of a run that writes into `folder`."""
        self._num_steps = num_steps
        self._folder = folder
        self._log_every = log_every
        self._first_loss = self._last_loss = 0.0
        self._tokens_per_s: list[float] = []
        self._exposed = ""

    def say(self, text: str) -> None:
        """Show a line, or several."""
        print(text, flush=True)

    def on_step(self, record: StepRecord) -> None:
        """Note the step's numbers, and show them."""
        if record.step == 1:
            self._first_loss = record.train_loss
        self._last_loss = record.train_loss
        self._tokens_per_s.append(record.tokens_per_s)
        # On CUDA few steps are measured: the steps between them show the latest measurement.
        if record.exposed_tp_comm_ms:
            self._exposed = f"{record.exposed_tp_comm_percent:.0f} %"
        self.show_step(record)

    def show_step(self, record: StepRecord) -> None:
        """Show the step's line, if it is its turn."""
        if record.step % self._log_every and record.step not in (1, self._num_steps):
            return
        parts = [
            f"step {record.step}/{self._num_steps}",
            f"train loss {record.train_loss:.4f}",
            f"lr {record.learning_rate:.2e}",
            f"{record.step_ms:.1f} ms",
            f"{record.tokens_per_s:.0f} tok/s",
        ]
        if self._exposed:
            parts.append(f"exposed comm {self._exposed}")
        if record.tokens_per_expert:
            parts.append(f"busiest expert {_busiest(record.tokens_per_expert)}")
        self.say(" | ".join(parts))

    def on_validation(self, step: int, loss: float) -> None:
        """Show the validation loss."""
        self.say(f"step {step}/{self._num_steps} | val loss {loss:.4f}")

    def on_sample(self, step: int, text: str) -> None:
        """Show the sample, set off from the other lines."""
        # A model that has learnt little writes control characters too, which a terminal would obey.
        harmless = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
        indented = "\n".join(f"  | {line}" for line in harmless.split("\n"))
        self.say(f"step {step}/{self._num_steps} | sample:\n{indented}")

    def on_save(self, step: int, folder: Path) -> None:
        """Show where."""
        self.say(f"step {step}/{self._num_steps} | saved {folder}")

    def on_success(self) -> None:
        """Show where it began, where it ended, how fast it was, and where to look."""
        self.close()
        self.say(
            f"train loss {self._first_loss:.4f} → {self._last_loss:.4f} in {self._num_steps} steps, "
            f"median {median(self._tokens_per_s):.0f} tok/s\nrun folder: {self._folder}"
        )


class ProgressBar(PlainLines):
    """On a terminal: the lines, and below them one that stays, with a bar and the numbers of the latest step."""

    def __init__(self, num_steps: int, folder: Path, *, log_every: int) -> None:
        """The bar appears with the first step.

        Raises:
            ImportError: rich is not installed.
        """
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(num_steps, folder, log_every=log_every)
        # The text never wraps: a line that did would be left behind at each redraw. The bar takes the rest of the line.
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(text, BarColumn(bar_width=None), expand=True, refresh_per_second=4)
        self._task = self._progress.add_task("", total=num_steps)
        self._started = 0.0

    def say(self, text: str) -> None:
        """Show text above the bar, as it is: samples are full of brackets, which rich would take for markup."""
        self._progress.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def show_step(self, record: StepRecord) -> None:
        """Move the bar, and show the step's line, if it is its turn."""
        if record.step == 1:
            # The first step is slower than the others; their time says what is left.
            self._started = time.perf_counter()
            left = "-:--"
        else:
            seconds = (time.perf_counter() - self._started) / (record.step - 1) * (self._num_steps - record.step)
            left = str(timedelta(seconds=round(seconds))).removeprefix("0:")
        # The order matters on a narrow terminal, which cuts off the end. All of it fits into 60 columns.
        text = f"{record.step}/{self._num_steps} loss {record.train_loss:.3f} {left} left"
        text += f" {_short(record.tokens_per_s)} tok/s" + (f" exposed {self._exposed}" if self._exposed else "")
        self._progress.update(self._task, completed=record.step, description=text)
        self._progress.start()
        super().show_step(record)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def _short(number: float) -> str:
    """`980`, `12.3k`, `1.2M`."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _busiest(tokens_per_expert: list[list[int]]) -> str:
    """The busiest expert of any layer, and how many times its even share it got."""
    loads = [
        (count * len(layer) / sum(layer), f"{number}.{expert}")
        for number, layer in enumerate(tokens_per_expert)
        for expert, count in enumerate(layer)
    ]
    load, name = max(loads)
    return f"{name} × {load:.2f}"
