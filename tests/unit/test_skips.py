"""The guard in `tests/conftest.py`: a new skip fails the run, a known one does not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("folder", "reason", "code"),
    [("unit", "it is Monday", 1), ("gpu", "it is Monday", 1), ("gpu", "needs 8 CUDA device(s), this machine has 0", 0)],
)
def test_only_known_skips_pass(tmp_path: Path, folder: str, reason: str, code: int, *, lanes: int) -> None:
    tests = tmp_path / "tests"
    (tests / folder).mkdir(parents=True)
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tests / folder / "test_it.py").write_text(
        "import pytest\n\n\ndef test_runs():\n    pass\n\n\n"
        f"@pytest.mark.xdist_group('ranks')\ndef test_it():\n    pytest.skip({reason!r})\n"
    )
    options = ["-q", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "-n", str(lanes), "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("does not know" in done.stdout) == (code != 0)
