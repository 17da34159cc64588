"""`shiplap verify`: it passes where the layers are right, says what is the same to the bit, and finds what is wrong."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shiplap import destroy_all_env, init_all_env
from shiplap.commands.main import main
from shiplap.dist.collectives import Handle, all_gather, rank_in
from shiplap.overlap.by_shard import P2P, RING
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.overlap.primitives import Kind
from shiplap.overlap.whole import REPLICATED
from shiplap.tensor_parallel import function
from shiplap.tools.verify.cases import all_groups
from shiplap.tools.verify.plans import column_plans, row_plans
from shiplap.tools.verify.verdict import Baselines, Finding, agree, find_out
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]
QUICK = "verify --quick --dtype float32"


def lines(out: str) -> dict[str, list[str]]:
    """The table's rows by name: dtype, cases, error, tolerance, as sequential, repeated, verdict."""
    rows = [re.split(r"  +", line) for line in out.splitlines() if line.endswith(("PASS", "FAIL"))]
    return {f"{name} {dtype}": [dtype, *cells] for name, dtype, *cells in rows}


def test_on_one_rank_there_is_nothing_to_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are so small that threads would only wait for each other
    try:
        assert main(["verify", "--tensor-parallel", "1"]) == 0
    finally:
        torch.set_num_threads(num_threads)
    out = capsys.readouterr().out
    names = [f"{subject} no SP {dtype}" for dtype in ("float32", "bfloat16") for subject in ("column", "row", "chain")]
    assert list(lines(out)) == names
    assert re.search(r"\nPASS: 6 rows, \d{3} cases on 1 rank in \d+ s\n$", out)


def test_it_starts_its_own_workers(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = f"{QUICK} --tensor-parallel 2 --json {file}".split()
    process = subprocess.run([sys.executable, "-m", "shiplap", *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].startswith("PASS: 11 rows")
    rows = lines(process.stdout)
    assert rows["column ring/p2p/bulk float32"][4:] == ["yes", "yes", "PASS"]
    assert rows["row sequential/sequential float32"][4:] == ["–", "yes", "PASS"]
    assert rows["chain SP, all overlap float32"][4:] == ["yes", "yes", "PASS"]
    results = json.loads(file.read_text())
    assert results["passed"]
    assert [row["name"] + " float32" for row in results["rows"]] == list(rows)
    for row in results["rows"]:
        assert 0 < row["error"] < row["tolerance"] / 4, row


def test_every_plan_of_the_switches_is_there_once() -> None:
    columns, rows = column_plans(4, quick=False), row_plans(4, quick=False)
    assert len({plans.column for plans in columns.values()}) == len(columns)
    assert len({plans.row for plans in rows.values()}) == len(rows)
    for forward in ("sequential", "ring"):
        for wgrad in ("sequential", "bulk"):
            for dgrad in ("sequential", "bulk", "p2p"):
                plan = ColumnPlan(forward=forward, dgrad=dgrad, wgrad=wgrad)
                assert columns[f"column {forward}/{dgrad}/{wgrad}"].column == plan
        for scatter in ("sequential", "p2p"):
            plans = rows[f"row {scatter}/{forward}"]
            assert plans.row == RowPlan(forward=scatter, dgrad=forward)


def test_several_groups_check_the_same(ranks: Ranks) -> None:
    (code, out, err), *others = ranks(2).run(command, ["verify --tensor-parallel 1 --dtype bfloat16"])
    assert (code, err) == (0, ""), out
    assert all(result == (0, "", "") for result in others)
    assert "TP 1 × DP 2" in out
    assert "on 2 ranks" in out
    assert [row[-1] for row in lines(out).values()] == ["PASS"] * 3


def test_only_ranks_of_one_group_must_be_alike() -> None:
    cases = all_groups(2, torch.float32, device="cpu", quick=True)[0]
    one = replace(cases, cases=cases.cases[:1])
    a, b = Finding(digests=[{"dx": "a"}], off_repeat={"dx": 0.0}), Finding(digests=[{"dx": "b"}], error=1e-9)
    assert agree(one, [a, a, b, b], 2).passed
    row = agree(one, [a, a, b, a], 2)
    assert row.error == 1e-9
    (failure,) = row.failures
    assert failure.startswith("rank 3: dx is not to the bit what rank 2 has")


def first_cases(num_cases: int) -> list[list[str]]:
    """On one rank: the first cases of every plan; what is wrong with them."""
    env = init_all_env(tensor_parallel_size=2, device="cpu")
    baselines: Baselines = {}
    failures = []
    for dtype in (torch.float32, torch.bfloat16):
        for cases in all_groups(2, dtype, device="cpu", quick=False):
            first = replace(cases, cases=cases.cases[:num_cases])
            failures.append(find_out(first, env.group("tp"), baselines).failures)
    destroy_all_env()
    return failures


def test_every_plan_runs(ranks: Ranks) -> None:
    """Those that no switch chooses too."""
    for failures in ranks(2).run(first_cases, 2):
        assert len(failures) == 2 * (len(column_plans(2, quick=False)) + len(row_plans(2, quick=False)) + 4)
        assert not any(failures), failures


def wrong_bias_gradient(dy: Tensor, *, dtype: torch.dtype) -> Tensor:
    return dy.flatten(0, -2)[1:].sum(dim=0, dtype=dtype)


def ring_with_wrong_rows(x_s: Tensor, consume: Callable[[slice, Tensor], None], group: Any, **_: Any) -> Tensor:
    """Every shard is there, and goes to where the last one belongs."""
    x_S = all_gather(x_s, group).wait()
    num_rows = x_s.shape[0]
    for start in range(0, x_S.shape[0], num_rows):
        consume(slice(start, start + num_rows), x_S[-num_rows:])
    return x_S


def unreduced(produce: Callable[[slice, Tensor], None], shape: torch.Size, *, like: Tensor, **_: Any) -> Handle:
    out = like.new_empty(shape)
    produce(slice(0, shape[0]), out)
    return Handle(out)


def last_bit_of_the_bias_gradient(dy: Tensor, *, dtype: torch.dtype) -> Tensor:
    grad = dy.flatten(0, -2).sum(dim=0, dtype=dtype)
    return torch.nextafter(grad, grad + 1) if os.environ["RANK"] == "1" else grad


def p2p_off_by_a_little_on_rank_1(*problem: Any, group: Any, **asked: Any) -> Handle:
    good = GOOD_P2P(*problem, group=group, **asked).wait()
    return Handle(good * (1 + 1e-4 * rank_in(group)))


GOOD_P2P: Any = P2P.scatter
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "bias_grad": (function, "bias_grad", wrong_bias_gradient),
    "last_bit": (function, "bias_grad", last_bit_of_the_bias_gradient),
    "ring": (RING, "gather", ring_with_wrong_rows),
    "unreduced": (REPLICATED, "scatter", unreduced),
    "p2p": (P2P, "scatter", p2p_off_by_a_little_on_rank_1),
}


def verify_broken(name: str, arguments: str) -> tuple[int, str, str]:
    """On one rank: run the command with something broken."""
    where, what, by = BROKEN[name]
    if isinstance(where, Kind):
        good = getattr(where, what)
        object.__setattr__(where, what, by)  # it is frozen
        try:
            return command([arguments])
        finally:
            object.__setattr__(where, what, good)
    with patch.object(where, what, by):
        return command([arguments])


# What is broken; by row, the tensor that must be said to be wrong; and rows that have nothing to do with it.
FOUND: list[tuple[str, dict[str, str], list[str]]] = [
    ("bias_grad", {"column no SP": "db", "column ring/bulk/bulk": "db", "row p2p/ring": "db"}, []),
    ("ring", {"column ring/bulk/bulk": "y", "row p2p/ring": "dx"}, ["column no SP", "row sequential/sequential"]),
    ("unreduced", {"column no SP": "dx", "row no SP": "y"}, ["column ring/bulk/bulk", "chain SP, all overlap"]),
    ("p2p", {"column ring/p2p/bulk": "dx", "row p2p/ring": "y"}, ["column ring/bulk/bulk"]),
]


@pytest.mark.parametrize(("broken", "wrong", "right"), FOUND, ids=[broken for broken, _, _ in FOUND])
def test_what_is_wrong_is_found(
    ranks: Ranks, tmp_path: Path, *, broken: str, wrong: dict[str, str], right: list[str]
) -> None:
    file = tmp_path / "results.json"
    results = ranks(2).run(verify_broken, broken, f"{QUICK} --tensor-parallel 2 --json {file}")
    assert [code for code, _, _ in results] == [1, 1]
    assert results[1] == (1, "", "")
    out = results[0][1]
    assert out.splitlines()[-1].startswith("FAIL: ")
    rows = lines(out)
    assert {rows[f"{name} float32"][-1] for name in wrong} == {"FAIL"}
    assert all(rows[f"{name} float32"][-1] == "PASS" for name in right)
    failures = {row["name"]: row["failures"] for row in json.loads(file.read_text())["rows"]}
    rank = 1 if broken == "p2p" else 0
    off = r"is off by \d\.\de[+-]\d\d, more than 2\.0e-06 \(plain, bias, gradients of "
    for name, tensor in wrong.items():
        assert any(re.match(f"rank {rank}: {tensor} {off}", failure) for failure in failures[name]), failures[name]
        assert failures[name][0] in out


def test_ranks_must_agree_to_the_bit_on_what_all_of_them_hold(ranks: Ranks) -> None:
    """An error that float32 explains, but by which the ranks' copies of a bias would drift apart."""
    results = ranks(2).run(verify_broken, "last_bit", f"{QUICK} --tensor-parallel 2")
    assert [code for code, _, _ in results] == [1, 1]
    out = results[0][1]
    assert lines(out)["row p2p/ring float32"][-1] == "FAIL"
    assert lines(out)["column ring/bulk/bulk float32"][-1] == "PASS"
    assert "rank 1: db is not to the bit what rank 0 has, as it must be (plain, bias, " in out


def test_what_a_case_raises_ends_the_job_with_the_rank_named(tmp_path: Path) -> None:
    """The other rank is in the middle of the ring, waiting."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from shiplap.overlap.by_shard import RING\n"
        "    def broken(*arguments, **numbers):\n"
        "        raise RuntimeError('a link is down')\n"
        "    object.__setattr__(RING, 'gather', broken)\n"
    )
    process = subprocess.run(
        [sys.executable, "-m", "shiplap", *QUICK.split()],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        timeout=120,
    )
    assert process.returncode == 1
    assert "RuntimeError: a link is down" in process.stderr
    assert "shiplap verify: this was column ring/bulk/bulk, float32: plain, bias, gradients of xWb" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("shiplap: error: rank 1 failed")


def test_a_reader_that_has_seen_enough_ends_all_ranks() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", "shiplap", *QUICK.split()], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(7) == b"2 ranks"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--tensor-parallel 0", ["--tensor-parallel", "at least 1", "got 0"]),
        ("--tensor-parallel 3", ["2 ranks", "= 3"]),
        ("--json /nowhere/results.json", ["--json /nowhere/results.json", "No such file"]),
    ],
)
def test_mistakes_are_named_once(ranks: Ranks, *, arguments: str, named: list[str]) -> None:
    results = ranks(2).run(command, [f"verify --quick {arguments}"])
    assert [code for code, _, _ in results] == [2, 2]
    assert all(out == "" for _, out, _ in results)
    for part in named:
        assert part in results[0][2]
