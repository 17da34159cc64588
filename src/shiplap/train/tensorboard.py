"""TensorBoard events of a run."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from shiplap.train.report import Report, StepRecord


class TensorBoardEvents(Report):
    """Events in the folder `tensorboard/`; look at them with `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        """Start an event file."""
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def on_step(self, record: StepRecord) -> None:
        """One point on each curve."""
        self._add("loss/train", record.train_loss, record.step)
        self._add("optimizer/learning_rate", record.learning_rate, record.step)
        self._add("optimizer/grad_norm", record.grad_norm, record.step)
        self._add("speed/step_ms", record.step_ms, record.step)
        self._add("speed/tokens_per_s", record.tokens_per_s, record.step)
        if record.exposed_tp_comm_ms is not None and record.exposed_tp_comm_percent is not None:
            self._add("speed/exposed_tp_comm_ms", record.exposed_tp_comm_ms, record.step)
            self._add("speed/exposed_tp_comm_percent", record.exposed_tp_comm_percent, record.step)
        if record.balance_loss is not None:
            self._add("experts/balance_loss", record.balance_loss, record.step)
        for layer, counts in enumerate(record.tokens_per_expert or []):
            for expert, count in enumerate(counts):
                self._add(f"experts/layer_{layer}/share_{expert}", count / sum(counts), record.step)

    def on_validation(self, step: int, loss: float) -> None:
        """One point on its curve."""
        self._add("loss/validation", loss, step)

    def on_sample(self, step: int, text: str) -> None:
        """As code, so that line breaks and spaces stay."""
        indented = "\n".join("    " + line for line in text.splitlines())
        self._writer.add_text("sample", indented, step)

    def close(self) -> None:
        """Write out what is still in memory."""
        self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
