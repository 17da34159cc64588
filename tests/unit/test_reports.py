"""What `shiplap train` shows: lines, and on a terminal one line below them that stays."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from shiplap.commands.main import main
from shiplap.config import OptimizerOptions, TrainConfig
from shiplap.train.reports import PlainLines, StepRecord

RUN = (
    "train gpt2 --vocab-size 257 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--max-sequence-length 16 --sequence-length 16 --batch-size 2 --data corpus.txt --run-dir run"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run; it has a corpus."""
    (tmp_path / "corpus.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps_shown(out: str) -> list[int]:
    """The steps that have a line."""
    return [int(step) for step in re.findall(r"^step (\d+)/\d+ \| train loss", out, re.MULTILINE)]


def steps_written(folder: Path) -> list[int]:
    """The steps in the metrics file."""
    return [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


class Screen:
    """A terminal so many columns wide that remembers every row, also those that have scrolled away."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0

    def show(self, text: str) -> None:
        """Do what a terminal does with text and the few control sequences that rich uses."""
        for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", text, re.DOTALL):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self._down()
            elif not piece.startswith("\x1b"):
                self._put(piece)
            elif piece == "\x1b[2K":
                self.rows[self.row] = ""
            elif piece.endswith("A"):
                self.row -= int(piece[2:-1] or 1)
            else:
                assert piece.endswith("m") or piece in ("\x1b[?25l", "\x1b[?25h"), f"unknown: {piece!r}"

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self._down()
            self.column = 0
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


def shown_on_a_terminal(arguments: str, columns: int) -> list[str]:
    """Run `shiplap` on a terminal of this width; what is on it in the end, row by row."""
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "shiplap", *arguments.split()],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(other_end)
    written = b""
    try:
        while piece := os.read(terminal, 65536):
            written += piece
    except OSError:  # Linux says so that the last process has closed its end
        pass
    os.close(terminal)
    screen = Screen(columns)
    screen.show(written.decode())
    assert process.wait() == 0, screen.rows
    return screen.rows


@pytest.mark.parametrize(
    ("columns", "parallel", "exposed"),
    [(60, "--tensor-parallel 2 --sequence-parallel", r"exposed \d+ % "), (100, "", "")],
)
def test_on_a_terminal_one_line_stays(folder: Path, columns: int, parallel: str, exposed: str) -> None:
    """With two ranks, the first one writes to the terminal of its parent."""
    flags = f"{parallel} --num-iteration 16 --log-every 5 --val-loss-every 8"
    rows = shown_on_a_terminal(f"{RUN} {flags}", columns)
    bars = [row for row in rows if " left " in row]
    assert len(bars) == 1, rows
    number = r"[\d.]+"
    assert re.match(rf"16/16 loss {number} 00:00 left {number}k? tok/s {exposed}━+ *$", bars[0]), bars[0]
    # The lines are above it, in order, and only the summary is below it.
    above, below = rows[: rows.index(bars[0])], rows[rows.index(bars[0]) + 1 :]
    assert steps_shown("\n".join(above)) == [1, 5, 10, 15, 16]
    assert "".join(above).count("val loss") == 2
    assert below[0].startswith("train loss ")
    assert sorted({*steps_written(folder)}) == [*range(1, 17)]


def test_elsewhere_there_are_lines_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{RUN} --num-iteration 16 --log-every 5".split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert steps_shown(out) == [1, 5, 10, 15, 16]
    assert "\x1b" not in out
    assert "\r" not in out
    assert " left " not in out
    assert steps_written(folder) == [*range(1, 17)]
    assert json.loads((folder / "run" / "config.json").read_text())["options"]["run"]["log_every"] == 5


@pytest.mark.parametrize(("num_steps", "num_lines"), [(1, 1), (3, 3), (30, 30), (100, 35), (1000, 32), (99_999, 32)])
def test_about_thirty_lines_come_by_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, num_steps: int, num_lines: int
) -> None:
    config = TrainConfig(optimizer=OptimizerOptions(num_iteration=num_steps))
    lines = PlainLines(num_steps, tmp_path, log_every=config.log_every)
    for step in range(1, num_steps + 1):
        lines.on_step(record(step))
    shown = steps_shown(capsys.readouterr().out)
    assert len(shown) == num_lines
    assert (shown[0], shown[-1]) == (1, num_steps)


def test_a_line_has_the_latest_exposed_communication(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On CUDA one step of ten is measured, which need not be one that has a line."""
    lines = PlainLines(40, tmp_path, log_every=20)
    for step in range(1, 41):
        lines.on_step(record(step, exposed=float(step) if step in (11, 31) else None))
    first, *others = capsys.readouterr().out.splitlines()
    assert "exposed" not in first
    assert [re.findall(r"exposed comm (\d+) %", line) for line in others] == [["11"], ["31"]]


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_line_every_no_steps_is_refused(capsys: pytest.CaptureFixture[str], folder: Path, value: str) -> None:
    assert main(f"{RUN} --log-every {value}".split()) == 2
    assert f"--log-every must be at least 1, got {value}" in capsys.readouterr().err
    assert not (folder / "run").exists()


def record(step: int, exposed: float | None = None) -> StepRecord:
    """A step in which this many percent were exposed."""
    return StepRecord(
        step=step,
        train_loss=1.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        step_ms=100.0,
        tokens_per_s=320.0,
        exposed_tp_comm_ms=exposed,
        exposed_tp_comm_percent=exposed,
    )
