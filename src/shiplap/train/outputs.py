"""Opens everything that a run shows and writes, and says what is missing for it."""

import sys
from pathlib import Path

from shiplap.dist import RankLayout
from shiplap.train.console import PlainLines
from shiplap.train.files import MetricsFile, SamplesFile
from shiplap.train.report import Report, Reports
from shiplap.train.run_folder import write_config
from shiplap.train.setup import Setup


def open_outputs(setup: Setup, folder: Path, *, layout: RankLayout, headline: str) -> Reports:
    """Show the headline, write the configuration, and open the rest. On one rank only.

    Args:
        setup: the run.
        folder: made by `claim_run_folder`.
        layout: of the ranks.
        headline: what to show before the first step.
    """
    console = _open_console(setup.config.optimizer.num_iteration, folder)
    console.say(headline)
    write_config(folder, setup, layout)
    reports: list[Report] = [console, MetricsFile(folder), SamplesFile(folder)]
    try:
        from shiplap.train.tensorboard import TensorBoardEvents

        reports.append(TensorBoardEvents(folder))
    except ImportError as error:
        console.say(_missing("TensorBoard events are not written", error))
    try:
        from shiplap.train.loss_curve import LossCurve

        reports.append(LossCurve(folder, title=f"{setup.family}, {setup.tokens_per_step} tokens per step"))
    except ImportError as error:
        console.say(_missing("The loss curve is not drawn", error))
    return Reports(reports)


def _open_console(num_steps: int, folder: Path) -> PlainLines:
    if not sys.stdout.isatty():
        return PlainLines(num_steps, folder)
    try:
        from shiplap.train.progress_bar import ProgressBar

        return ProgressBar(num_steps, folder)
    except ImportError as error:
        lines = PlainLines(num_steps, folder)
        lines.say(_missing("There is no progress bar", error))
        return lines


def _missing(what: str, error: ImportError) -> str:
    return f"{what} ({error}): pip install 'shiplap[train]' brings it."
