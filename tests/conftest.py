"""No test may be skipped unless it is known which, and why: a new skip fails the run."""

import re
from collections.abc import Generator

import pytest

KNOWN_SKIPS = {
    r"tests/gpu/.*": r"needs \d+ CUDA device\(s\), this machine has \d+",
    r"tests/distributed/test_topology\.py::test_process_groups_end.*": "threads are counted in /proc",
    r"tests/unit/test_topology\.py::test_absent_cuda_is_refused": "this machine has CUDA",
    r"tests/distributed/test_hosts\.py::.*": r".* not found; .*iproute2|network namespaces need root .*|root lacks .*",
}
_unknown = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_unknown] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(test, item.nodeid) and re.fullmatch(why, reason) for test, why in KNOWN_SKIPS.items()):
            item.config.stash[_unknown].append(f"{item.nodeid}: {reason}")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[_unknown] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for skip in config.stash[_unknown]:
        terminalreporter.write_line(f"ERROR a skip that tests/conftest.py does not know: {skip}", red=True)
