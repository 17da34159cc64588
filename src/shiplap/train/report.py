"""What a run tells the world, and who listens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


class Reports(Report):
    """Passes everything on to others. Ranks that report nothing have none."""

    def __init__(self, reports: Sequence[Report]) -> None:
        """In the order in which they hear."""
        self._reports = reports

    def on_step(self, record: StepRecord) -> None:
        """Pass it on."""
        for report in self._reports:
            report.on_step(record)

    def on_validation(self, step: int, loss: float) -> None:
        """Pass it on."""
        for report in self._reports:
            report.on_validation(step, loss)

    def on_sample(self, step: int, text: str) -> None:
        """Pass it on."""
        for report in self._reports:
            report.on_sample(step, text)

    def on_save(self, step: int, folder: Path) -> None:
        """Pass it on."""
        for report in self._reports:
            report.on_save(step, folder)

    def on_success(self) -> None:
        """Pass it on."""
        for report in self._reports:
            report.on_success()

    def close(self) -> None:
        """Pass it on."""
        for report in self._reports:
            report.close()
