"""The files of a run's folder: configuration, metrics, samples, TensorBoard events, loss curve."""

import dataclasses
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import shiplap
from shiplap.config import TrainConfig
from shiplap.dist import RankLayout
from shiplap.train.reports import PlainLines, ProgressBar, Report, StepRecord
from shiplap.train.setup import Setup


class MetricsFile(Report):
    """`metrics.jsonl`: one JSON object a line, for each step and each validation loss. Units are in the keys."""

    def __init__(self, folder: Path) -> None:
        """Open it; every line is written at once, so that others can follow."""
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)

    def on_step(self, record: StepRecord) -> None:
        """Write all that there is: a model without experts has no numbers about them."""
        self._write({key: value for key, value in dataclasses.asdict(record).items() if value is not None})

    def on_validation(self, step: int, loss: float) -> None:
        """Write `step` and `val_loss`."""
        self._write({"step": step, "val_loss": loss})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, values: Mapping[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")


class SamplesFile(Report):
    """`samples.txt`: what the model wrote, if it was asked to."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet."""
        self._path = folder / "samples.txt"

    def on_sample(self, step: int, text: str) -> None:
        """Append it."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n\n")


class TensorBoardEvents(Report):
    """Events in the folder `tensorboard/`; look at them with `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        """Start an event file."""
        from torch.utils.tensorboard import SummaryWriter

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


class LossCurve(Report):
    """`loss.png`, drawn when the run ends: training and validation loss over the steps."""

    def __init__(self, folder: Path, title: str) -> None:
        """Draw nothing yet, but refuse now, rather than after the last step, if matplotlib is not installed."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        FigureCanvasAgg(self._figure)
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
        axes = self._figure.add_subplot()
        axes.plot(*zip(*self._train, strict=True), label="training", linewidth=1.5)
        if self._validation:
            axes.plot(*zip(*self._validation, strict=True), "o-", label="validation", markersize=5)
        axes.set_xlabel("optimizer step", fontsize=13)
        axes.set_ylabel("loss (nats per token)", fontsize=13)
        axes.set_title(self._title, fontsize=13)
        axes.tick_params(labelsize=12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=12)
        self._figure.savefig(self._path)


def _write_config(folder: Path, setup: Setup, layout: RankLayout) -> None:
    """Write `config.json`: every option with what its default came to, the model's sizes, and the versions."""
    config = setup.config
    resolved = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, total_batch_size=setup.tokens_per_step),
        run=dataclasses.replace(config.run, nproc=layout.world_size, run_dir=str(folder), log_every=config.log_every),
    )
    content = {
        "family": setup.family,
        "transformer": dataclasses.asdict(setup.model),
        "options": dataclasses.asdict(resolved),
        "world_size": layout.world_size,
        "layout": layout.sizes,
        "versions": {
            "shiplap": shiplap.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def open_reports(setup: Setup, folder: Path, *, layout: RankLayout, headline: str) -> list[Report]:
    """Show the headline, write `config.json`, and open the rest. On one rank only.

    Args:
        setup: the run.
        folder: made by `claim_run_folder`.
        layout: of the ranks.
        headline: shown before the first step.
    """
    console = _open_console(setup.config, folder)
    console.say(headline)
    _write_config(folder, setup, layout)
    reports: list[Report] = [console, MetricsFile(folder), SamplesFile(folder)]
    try:
        reports.append(TensorBoardEvents(folder))
    except ImportError as error:
        console.say(_missing("TensorBoard events are not written", error))
    try:
        reports.append(LossCurve(folder, title=f"{setup.family}, {setup.tokens_per_step} tokens per step"))
    except ImportError as error:
        console.say(_missing("The loss curve is not drawn", error))
    return reports


def _open_console(config: TrainConfig, folder: Path) -> PlainLines:
    num_steps, log_every = config.optimizer.num_iteration, config.log_every
    if not sys.stdout.isatty():
        return PlainLines(num_steps, folder, log_every=log_every)
    try:
        return ProgressBar(num_steps, folder, log_every=log_every)
    except ImportError as error:
        lines = PlainLines(num_steps, folder, log_every=log_every)
        lines.say(_missing("There is no progress bar", error))
        return lines


def _missing(what: str, error: ImportError) -> str:
    return f"{what} ({error}): pip install 'shiplap[train]' brings it."
