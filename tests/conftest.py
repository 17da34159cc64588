"""No test may be skipped unless it is known which, and why: a new skip fails the run."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPool

RANKS = "ranks"
TESTS = Path(__file__).parent
QUICK = {
    *(f"unit/test_{name}.py" for name in ("config", "house", "method", "placement", "plan", "optim", "topology")),
    *(f"distributed/test_{name}.py" for name in ("compositions", "hot_path", "linear", "models", "pacing")),
}
KNOWN_SKIPS = {
    r"tests/gpu/.*": r"needs \d+ CUDA device\(s\), this machine has \d+",
    r"tests/distributed/test_topology\.py::test_process_groups_end.*": "threads are counted in /proc",
    r"tests/unit/test_topology\.py::test_absent_cuda_is_refused": "this machine has CUDA",
    r"tests/distributed/test_hosts\.py::.*": r".* not found; .*iproute2|network namespaces need root .*|root lacks .*",
}


class SkipGuard:
    """Sees every report where the run is decided: with several workers, in the process that started them."""

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        test = report.nodeid.removesuffix(f"@{RANKS}")
        if not any(re.fullmatch(known, test) and re.fullmatch(why, reason) for known, why in KNOWN_SKIPS.items()):
            self.unknown.append(f"{test}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unknown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for skip in self.unknown:
            terminalreporter.write_line(f"ERROR a skip that tests/conftest.py does not know: {skip}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, all tests of the ranks that stay up go to one of them: they start once."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(RANKS))
        if is_quick(item):
            item.add_marker(pytest.mark.quick)


def is_quick(item: pytest.Item) -> bool:
    """Whether a test is of the daily loop: the core, on one or two ranks, in float32."""
    settings = item.callspec.params if hasattr(item, "callspec") else {}
    is_small = settings.get("num_ranks", 2) <= 2 and settings.get("dtype", torch.float32) == torch.float32
    return is_small and item.path.relative_to(TESTS).as_posix() in QUICK and item.get_closest_marker("full") is None


@pytest.fixture(scope="session")
def ranks() -> Iterator["Callable[[int], RankPool]"]:
    """`ranks(n)`: n ranks, started at the first use and kept for the session."""
    from tests.distributed.ranks import RankPool  # here: test_skips.py copies this file alone

    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.stop()
