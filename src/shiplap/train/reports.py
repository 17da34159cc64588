"""What a run reports, who listens, and how a terminal shows it."""

from dataclasses import dataclass
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
    """One line a step on standard output, and a summary at the end."""

    def __init__(self, num_steps: int, folder: Path) -> None:
        """For a run of so many steps, which writes into `folder`."""
        self._num_steps = num_steps
        self._folder = folder
        self._records: list[StepRecord] = []

    def say(self, text: str) -> None:
        """Show a line, or several."""
        print(text, flush=True)

    def show_step(self, line: str) -> None:
        """Show the line of a step."""
        self.say(line)

    def on_step(self, record: StepRecord) -> None:
        """Show the step's numbers."""
        self._records.append(record)
        self.show_step(
            f"step {record.step}/{self._num_steps} | train loss {record.train_loss:.4f} | "
            f"lr {record.learning_rate:.2e} | {record.step_ms:.1f} ms | {record.tokens_per_s:.0f} tok/s"
            + (f" | exposed comm {record.exposed_tp_comm_percent:.0f} %" if record.exposed_tp_comm_ms else "")
            + (f" | busiest expert {_busiest(record.tokens_per_expert)}" if record.tokens_per_expert else "")
        )

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
        first, last = self._records[0], self._records[-1]
        speed = median(record.tokens_per_s for record in self._records)
        self.close()
        self.say(
            f"train loss {first.train_loss:.4f} → {last.train_loss:.4f} in {self._num_steps} steps, "
            f"median {speed:.0f} tok/s\nrun folder: {self._folder}"
        )


class ProgressBar(PlainLines):
    """The numbers of the latest step beside a bar."""

    def __init__(self, num_steps: int, folder: Path) -> None:
        """The bar appears with the first step."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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


def _busiest(tokens_per_expert: list[list[int]]) -> str:
    """The busiest expert of any layer, and how many times its even share it got."""
    loads = [
        (count * len(layer) / sum(layer), f"{number}.{expert}")
        for number, layer in enumerate(tokens_per_expert)
        for expert, count in enumerate(layer)
    ]
    load, name = max(loads)
    return f"{name} × {load:.2f}"
