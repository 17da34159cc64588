"""Measured plans on disk: what is written is read, and what is damaged is refused, by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiplap.config import UserError
from shiplap.tuning.plan_file import check_writable, read_plan, write_plan
from tests.cases.measured import damage, drop, loaded, plan_of, put, run_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(plan_of(run_of()), path)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, plan = tmp_path / "in a folder" / "that is new" / "plan.json", plan_of(run_of())
    write_plan(plan, path)
    assert read_plan(path) == replace(plan, source=str(path))


# Pass 0 is QKV's forward, pass 1 its backward, pass 2 the output projection's forward, pass 3 its backward.
DAMAGED: list[tuple[Callable[[Any], object], list[str]]] = [
    (drop("format"), ["no measured plan of this version", "shiplap tune"]),
    (put("format", value="shiplap measured plan 2"), ["no measured plan of this version"]),
    (put("format", value=1), ["format must be a string, got 1"]),
    (drop("made"), ["made is missing"]),
    (drop("passes"), ["passes is missing"]),
    (put("passes", value={}), ["passes must be a list"]),
    (put("passes", 1, value=[]), ["passes 1 is not an object"]),
    (drop("conditions"), ["conditions: tensor_parallel is missing"]),
    (put("conditions", value=[1]), ["conditions must be an object"]),
    (put("conditions", "batch", value="3"), ['conditions: batch must be a whole number, got "3"']),
    (put("conditions", "threads", value=0), ["conditions: threads must be at least 1, got 0"]),
    (put("conditions", "dtype", value=32), ["conditions: dtype must be a string, got 32"]),
    (drop("passes", 2, "direction"), ["passes 2: direction is missing"]),
    (put("passes", 2, "direction", value="sideways"), ["passes 2", "direction sideways", "forward or backward"]),
    (drop("passes", 2, "layer"), ["passes 2: layer: kind is missing"]),
    (put("passes", 2, "layer", "kind", value="diagonal"), ["passes 2", "kind diagonal", "column or row"]),
    (put("passes", 2, "layers", value="all"), ["passes 2: layers must be a list"]),
    (drop("passes", 2, "method"), ["passes 2: method is missing"]),
    (drop("passes", 2, "fields"), ["passes 2: fields is missing"]),
    (put("passes", 2, "fields", value="ring"), ["passes 2: fields must be an object"]),
    (put("passes", 0, "fields", "forward", value=2), ["passes 0: fields: forward must be a string, got 2"]),
    (put("passes", 0, "fields", "forward", value=None), ["passes 0: fields: forward is missing"]),
    (put("passes", 0, "fields", "dgrad", value="bulk"), ["passes 0: fields has dgrad, which no forward pass"]),
    (put("passes", 1, "fields", "sidegrad", value="bulk"), ["passes 1: fields has sidegrad, which no backward pass"]),
    (put("passes", 1, "fields", "is_measured", value="no"), ["passes 1: fields has is_measured"]),
    (put("passes", 3, "fields", "wgrad", value="bulk"), ["passes 3: fields: wgrad must be whole or parts"]),
    (put("passes", 3, "fields", "keeps", value="shard"), ["passes 3: fields has keeps", "of a row layer"]),
    (put("passes", 3, "fields", "keeps", value="shard"), ["passes 3: fields has keeps", "of a row layer"]),
    (put("passes", 1, "fields", "keeps", value="half"), ["passes 1: fields: keeps must be shard or gathered"]),
    (put("passes", 1, "is_clear", value=1), ["passes 1: is_clear must be true or false, got 1"]),
    (put("passes", 1, "speedup", value="fast"), ["passes 1: speedup must be a number"]),
    (put("passes", 1, "speedup", value=-1), ["passes 1: speedup must be at least 0, got -1"]),
    (drop("passes", 1, "timings"), ["passes 1: timings is missing"]),
    (put("passes", 1, "timings", "ring:2", value=3.0), ["passes 1: timings: ring:2 must be an object, got 3.0"]),
    (drop("passes", 1, "timings", "ring:2", "median_ms"), ["passes 1: timings: ring:2: median_ms is missing"]),
    (put("passes", 1, "timings", "ring:2", "rounds", value=0), ["timings: ring:2: rounds must be at least 1, got 0"]),
    (put("passes", 1, "kept", value=True), ["passes 1: kept must be an object, got true"]),
    (put("passes", 1, "kept", value={"method": "bulk"}), ["passes 1: kept: speedup is missing"]),
    (lambda content: content["passes"].append(content["passes"][3]), ["passes 10 is of the same layer and direction"]),
]


@pytest.mark.parametrize(("change", "named"), DAMAGED, ids=[named[0][:40] for _, named in DAMAGED])
def test_a_damaged_file_is_refused(file: Path, change: Callable[[Any], object], *, named: list[str]) -> None:
    damage(file, change)
    with pytest.raises(UserError) as refused:
        read_plan(file)
    assert str(file) in str(refused.value)
    for part in named:
        assert part in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "is not valid JSON"),
        ('{"format": "shiplap measured plan 1", "made": ', "is not valid JSON"),
        ("[]", "holds a JSON list instead of an object"),
        ("{}", "is no measured plan of this version"),
        ("\x00\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_is_no_plan_at_all_is_refused(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=f"^{path}.*{named}"):
        read_plan(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/nothing\.json: cannot read it: No such file or directory"):
        loaded(tmp_path / "nothing.json", run_of())


def test_a_plan_is_written_whole_or_not_at_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plan = file.read_text(), plan_of(run_of(size=4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("pathlib.Path.write_text", full)
        with pytest.raises(UserError, match=f"^{file}: cannot write the plan: No space left on device"):
            write_plan(plan, file)
    with monkeypatch.context() as broken:
        broken.setattr("os.replace", full)
        with pytest.raises(UserError, match="No space left on device"):
            write_plan(plan, file)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file], "something was left behind"
    write_plan(plan, file)
    assert read_plan(file).conditions.tensor_parallel == 4
    assert list(file.parent.iterdir()) == [file]


def test_a_plan_may_be_read_by_whom_files_usually_may(file: Path) -> None:
    usual = file.with_name("usual")
    usual.touch()
    assert file.stat().st_mode == usual.stat().st_mode


def test_places_that_cannot_be_written_are_refused_beforehand(file: Path) -> None:
    check_writable(file)
    check_writable(file.parent / "new" / "plan.json")
    with pytest.raises(UserError, match=f"^{file}/plan.json: cannot write the plan: "):
        check_writable(file / "plan.json")
    with pytest.raises(UserError, match=f"^{file.parent} is a folder; name a file in it"):
        check_writable(file.parent)
    assert {path.name for path in file.parent.iterdir()} == {"plan.json", "new"}
