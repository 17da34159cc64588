"""The text files of a run folder: metrics and samples."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from shiplap.train.report import Report, StepRecord


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
