"""One rank's part of verifying the layers, and showing what all ranks found."""

import logging
import time
from typing import Literal

import torch

from shiplap.config.option import flags_of
from shiplap.dist import GlobalEnv
from shiplap.dist.agreement import fail_together, gather_texts
from shiplap.dist.hardware import device_name
from shiplap.dist.launch import agreed_env
from shiplap.tools.verify.cases import CaseGroup, all_groups
from shiplap.tools.verify.options import VerifyConfig
from shiplap.tools.verify.table import Table, check_writable, write_json
from shiplap.tools.verify.verdict import Baselines, Finding, Row, agree, find_out

_SECONDS_BETWEEN_NOTES = 10.0
_logger = logging.getLogger(__name__)
Outcome = Literal["passed", "failed", "unread"]


class _Output:
    """The standard output of the first rank.

    Attributes:
        is_read: whether there is still somebody who reads it.
    """

    def __init__(self, env: GlobalEnv) -> None:
        self._is_first = env.rank == 0
        self.is_read = True

    def say(self, text: str) -> None:
        """Show it at once: who waits for it wants to see it, and a launcher may end this process before it could."""
        if self._is_first and self.is_read:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                self.is_read = False

    def agree(self) -> bool:
        """Let all ranks know whether somebody reads it, and return that."""
        self.is_read = not any(gather_texts("" if self.is_read else "nobody reads it"))
        return self.is_read


def verify(config: VerifyConfig) -> Outcome:
    """Check the parallel layers, as one rank of the job in whose `joined_world` this is called, or alone.

    The first rank writes the table to the standard output, a row as soon as it is known.

    Args:
        config: what was asked for.

    Returns:
        Whether everything is right, on every rank; or that nobody reads the standard output any more, so that all ranks
        have stopped. They all know.

    Raises:
        AgreedError: on every rank, if any finds a mistake in what was asked for.
    """
    check = config.check
    settings = {"the PyTorch version": torch.__version__, **flags_of(config)}
    with agreed_env(check.parallel, device=check.device, settings=settings) as env:
        with fail_together():
            if env.rank == 0:
                check_writable(check.json_file)
        output, begin = _Output(env), time.perf_counter()
        rows = _check_all(config, env, output)
        output.say(_total(rows, env, time.perf_counter() - begin))
        if not output.agree():
            return "unread"
        with fail_together():
            if env.rank == 0 and check.json_file is not None:
                write_json(check.json_file, rows, _job(env))
    return "passed" if all(row.passed for row in rows) else "failed"


def _check_all(config: VerifyConfig, env: GlobalEnv, output: _Output) -> list[Row]:
    check, num_ranks = config.check, config.check.tensor_parallel_size
    groups: list[CaseGroup] = []
    for dtype in check.dtypes:
        groups += all_groups(num_ranks, getattr(torch, dtype), device=check.device, quick=check.quick)
    table = Table(cases.name for cases in groups)
    output.say(f"{env.overview()}\nPyTorch {torch.__version__}, {check.device}: {device_name(env.device)}\n")
    output.say(table.header())
    rows: list[Row] = []
    baselines: Baselines = {}
    begin = noted = time.perf_counter()
    for cases in groups:
        finding = find_out(cases, env.group("tp"), baselines)
        findings = [Finding.from_text(text) for text in gather_texts(finding.to_text())]
        rows.append(agree(cases, findings, num_ranks))
        output.say(table.row(rows[-1]))
        if not output.agree():
            break
        now = time.perf_counter()
        if now - noted > _SECONDS_BETWEEN_NOTES:
            noted = now
            _logger.info("verify: %d of %d rows after %.0f s", len(rows), len(groups), now - begin)
    return rows


def _total(rows: list[Row], env: GlobalEnv, seconds: float) -> str:
    num_cases, num_failed = sum(row.num_cases for row in rows), sum(not row.passed for row in rows)
    verdict = f"FAIL: {num_failed} of {len(rows)} rows," if num_failed else f"PASS: {len(rows)} rows,"
    num_ranks = env.layout.world_size
    return f"\n{verdict} {num_cases} cases on {num_ranks} rank{'' if num_ranks == 1 else 's'} in {seconds:.0f} s"


def _job(env: GlobalEnv) -> dict[str, object]:
    return {
        "pytorch": torch.__version__,
        "device": device_name(env.device),
        "num_ranks": env.layout.world_size,
        "tensor_parallel_size": env.layout.size("tp"),
    }
