"""The loss curve of a run, as a picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shiplap.train.report import Report, StepRecord


class LossCurve(Report):
    """`loss.png`, drawn when the run ends: training and validation loss over the steps."""

    def __init__(self, folder: Path, title: str) -> None:
        """Draws nothing yet."""
        self._path = folder / "loss.png"
        self._title = title
        self._train: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []

    def on_step(self, record: StepRecord) -> None:
        """Remember the point."""
        self._train.append((record.step, record.train_loss))

    def on_validation(self, step: int, loss: float) -> None:
        """Remember the point."""
        self._validation.append((step, loss))

    def close(self) -> None:
        """Draw what there is."""
        if not self._train:
            return
        figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*zip(*self._train, strict=True), label="training", linewidth=1.5)
        if self._validation:
            axes.plot(*zip(*self._validation, strict=True), "o-", label="validation", markersize=5)
        axes.set_xlabel("optimizer step", fontsize=13)
        axes.set_ylabel("loss (nats per token)", fontsize=13)
        axes.set_title(self._title, fontsize=13)
        axes.tick_params(labelsize=12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=12)
        figure.savefig(self._path)
