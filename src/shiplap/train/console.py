"""What a run shows, as plain lines."""

from pathlib import Path
from statistics import median

from shiplap.train.report import Report, StepRecord


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


def _busiest(tokens_per_expert: list[list[int]]) -> str:
    """The busiest expert of any layer, and how many times its even share it got."""
    loads = [
        (count * len(layer) / sum(layer), f"{number}.{expert}")
        for number, layer in enumerate(tokens_per_expert)
        for expert, count in enumerate(layer)
    ]
    load, name = max(loads)
    return f"{name} × {load:.2f}"
