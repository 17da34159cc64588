"""Measured plans in `shiplap explain`, under strictness and on the command line, before any rank starts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiplap.commands.main import main
from shiplap.commands.tune import TuneConfig, TuneOptions
from shiplap.config import ModelParallelConfig, TrainConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.config.parallel import PlanOptions
from shiplap.inspection.site_table import site_table
from shiplap.inspection.sites import Reason, Site, sites_of_run
from shiplap.inspection.strict import check_strict, not_acting
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.tuning.plan_file import write_plan
from tests.cases.measured import damage, plan_of, put
from tests.unit.test_explain import DISABLE_QKV, FC1, FC2, HEAD, PROJ, QKV, by_place, columns, model_of, rows, run_of

AG, RS, RS_DGRAD = "--tp-comm-overlap-ag", "--tp-comm-overlap-rs", "--tp-comm-overlap-rs-dgrad"
BULK_DGRAD, BULK_WGRAD, KEEP = "--tp-comm-bulk-dgrad", "--tp-comm-bulk-wgrad", "--tp-comm-keep-gathered"
NOTHING = RowPlan(forward="sequential", dgrad="sequential")


def sites_with(config: TrainConfig, column: ColumnPlan, row: Mapping[str, Any] | None = None) -> dict[str, Site]:
    """The sites of a model whose layers all have these plans, measured."""
    model = model_of(config)
    for layer in columns(model):
        layer.plan = replace(column, is_measured=True)
    for other in rows(model):
        other.plan = replace(NOTHING, **(row or {}), is_measured=True)
    return by_place(sites_of_run(model, config))


def column_of(
    forward: str = "sequential", dgrad: str = "sequential", wgrad: str = "sequential", **other: Any
) -> ColumnPlan:
    return ColumnPlan(forward=forward, dgrad=dgrad, wgrad=wgrad, **other)


@pytest.mark.parametrize(
    ("column", "row", "place", "behind", "switch"),
    [
        (column_of("ring"), {}, f"{QKV} forward", "forward", AG),
        (column_of("ring:4"), {}, f"{QKV} forward", "forward", AG),
        (column_of("shards_per_gemm:1,1"), {}, f"{QKV} forward", "forward", AG),
        (column_of(dgrad="bulk"), {}, f"{FC1} dgrad", "wgrad", BULK_DGRAD),
        (column_of(dgrad="p2p:2"), {}, f"{FC1} dgrad", "dgrad", RS_DGRAD),
        (column_of(dgrad="row_chunks"), {}, f"{FC1} dgrad", "dgrad", RS_DGRAD),
        (column_of(wgrad="bulk"), {}, f"{HEAD} wgrad", "dgrad", BULK_WGRAD),
        (column_of(wgrad="ring:2"), {}, f"{HEAD} wgrad", "wgrad", BULK_WGRAD),
        (column_of(), {"forward": "reduce"}, f"{PROJ} forward", "forward", RS),
        (column_of(), {"forward": "row_chunks:1,1"}, f"{PROJ} forward", "forward", RS),
        (column_of(), {"dgrad": "ring:8"}, f"{FC2} dgrad", "dgrad", AG),
    ],
)
def test_overlap_that_was_measured_is_the_switch_s_that_allows_it(
    column: ColumnPlan, row: dict[str, str], place: str, *, behind: str, switch: str
) -> None:
    sites = sites_with(run_of(tp_comm_overlap_rs_dgrad=True), column, row)
    site = sites[place]
    assert (site.hidden_behind, site.switch, site.reason, site.why_not) == (behind, switch, None, "")
    assert site.is_measured
    assert site_table([site]).endswith(f"the {behind} product, measured")


def test_a_measured_method_that_is_the_switch_s_own_is_marked_too() -> None:
    site = sites_with(run_of(), column_of("ring", "bulk", "bulk"))[f"{QKV} forward"]
    assert (site.method, site.switch, site.is_plan_replaced) == ("ring", AG, False)
    assert site_table([site]).endswith("the forward product, measured")


@pytest.mark.parametrize("place", [f"{QKV} forward", f"{QKV} dgrad", f"{QKV} wgrad", f"{FC2} forward", f"{FC2} dgrad"])
def test_where_nothing_is_faster_it_says_so(place: str) -> None:
    site = sites_with(run_of(), column_of())[place]
    assert (site.reason, site.hidden_behind, site.switch) == (Reason.NOT_FASTER, None, None)
    assert site.why_not == "measured: nothing that overlaps is clearly faster"
    assert site.why_not in site_table([site])


@pytest.mark.parametrize(
    ("switches", "place", "reason", "why_not"),
    [
        ({"tp_comm_overlap_ag": False}, f"{QKV} forward", Reason.SWITCH_OFF, f"{AG} is off"),
        ({"tp_comm_overlap_rs": False}, f"{FC2} forward", Reason.SWITCH_OFF, f"{RS} is off"),
        ({"tp_comm_overlap_disable_qkv": True}, f"{QKV} forward", Reason.LAYER_DISABLED, f"{DISABLE_QKV} is on"),
        ({"tp_comm_bulk_wgrad": False}, f"{QKV} wgrad", Reason.SWITCH_OFF, f"{BULK_WGRAD} is off"),
    ],
)
def test_what_a_switch_turned_off_was_not_measured(
    switches: dict[str, Any], place: str, *, reason: Reason, why_not: str
) -> None:
    site = sites_with(run_of(**switches), column_of())[place]
    assert (site.reason, site.why_not) == (reason, why_not)


@pytest.mark.parametrize(("asked", "by"), [(False, "the measured plan"), (True, KEEP)])
def test_who_keeps_the_gathered_input(asked: bool, by: str) -> None:
    config = run_of(tp_comm_keep_gathered=asked)
    site = sites_with(config, column_of("ring", "bulk", keeps="gathered"))[f"{QKV} wgrad"]
    assert (site.communicates, site.reason) == ("nothing", Reason.KEPT_GATHERED)
    assert site.why_not == f"x is kept as gathered in forward, by {by}"


@pytest.mark.parametrize(
    ("switches", "column", "row", "idle"),
    [
        ({}, column_of("ring:2", "bulk", "ring"), {"forward": "reduce"}, []),
        ({}, column_of(), {}, [AG, RS, BULK_WGRAD, BULK_DGRAD]),
        ({}, column_of(dgrad="bulk", wgrad="bulk"), {"forward": "p2p"}, [AG]),
        # One layer is enough.
        ({}, column_of(dgrad="bulk", wgrad="bulk"), {"forward": "p2p", "dgrad": "ring:4"}, []),
        ({}, column_of("ring", "bulk", "bulk"), {}, [RS]),
        ({}, column_of("ring", "sequential", "bulk"), {"forward": "p2p"}, [BULK_DGRAD]),
        # The pipeline was on and lost to bulk; where it wins, it takes bulk's place.
        ({"tp_comm_overlap_rs_dgrad": True}, column_of("ring", "bulk", "bulk"), {"forward": "p2p"}, [RS_DGRAD]),
        ({"tp_comm_overlap_rs_dgrad": True}, column_of("ring", "reduce", "bulk"), {"forward": "p2p"}, []),
        # Nobody asked for what the plan keeps, but there is nothing left to gather.
        ({}, column_of("ring", "bulk", keeps="gathered"), {"forward": "p2p"}, [BULK_WGRAD]),
        ({"tp_comm_keep_gathered": True}, column_of("ring", "bulk", keeps="gathered"), {"forward": "p2p"}, []),
    ],
)
def test_switches_that_a_plan_makes_idle(
    switches: dict[str, Any], column: ColumnPlan, row: dict[str, str], *, idle: list[str]
) -> None:
    config = run_of(**switches, tp_comm_strict=True)
    sites = list(sites_with(config, column, row).values())
    assert list(not_acting(config.parallel, sites)) == idle
    if not idle:
        check_strict(config.parallel, sites)
        return
    with pytest.raises(UserError) as refused:
        check_strict(config.parallel, sites)
    for flag in idle:
        assert f"{flag} acts nowhere:" in str(refused.value)
        assert flag.replace("--", "--no-", 1) in str(refused.value)


SIZES = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --sequence-length 15"
RUN = f"gpt2 {SIZES} --batch-size 3 --tensor-parallel 2 --sequence-parallel --tp-comm-overlap"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A plan of this run's sizes."""
    path = tmp_path / "plan.json"
    write_plan(plan_of(run_of()), path)
    return path


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Whoever starts workers fails; the folder that commands run in."""

    def start_workers(*_: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("shiplap.commands.run_on_ranks.start_workers", start_workers)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_verb_shows_a_plan(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert main(["explain", *RUN.split(), "--tp-comm-plan", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "ring:2" in out
    assert "the forward product, measured" in out
    assert "measured: nothing that overlaps is clearly faster" in " ".join(out.split())
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_verb_shows_a_plan_as_json(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert main(["explain", *RUN.split(), "--tp-comm-plan", str(file), "--json"]) == 0
    sites = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(site["is_measured"] for site in sites)
    methods = {(site["kind"], site["site"]): site["method"] for site in sites}
    assert methods == {
        ("column", "forward"): "ring:2",
        ("column", "dgrad"): "bulk_p2p",
        ("column", "wgrad"): "ring",
        ("row", "forward"): "row_chunks",
        ("row", "dgrad"): "sequential",
    }


def test_a_plan_that_is_yet_to_be_measured_is_explained_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """What it will leave idle nobody knows."""
    flags = f"--tp-comm-plan auto --tp-comm-strict {RS_DGRAD} --tp-comm-overlap-disable-qkv"
    lora = "--lora-rank 4 --lora-target-modules fc2"
    assert main(["explain", *RUN.split(), *flags.split(), *lora.split()]) == 0
    out = capsys.readouterr().out
    assert "--tp-comm-plan auto: these are the switches' methods; training measures its own." in out
    assert "measured," not in out


def test_strictness_with_a_plan_refuses_after_the_table(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    damage(file, put("passes", 2, "fields", "forward", value="sequential"))
    damage(file, put("passes", 6, "fields", "forward", value="sequential"))
    assert main(["explain", *RUN.split(), "--tp-comm-plan", str(file), "--tp-comm-strict"]) == 2
    out, err = capsys.readouterr()
    assert "hidden behind" in out
    assert f"{RS} acts nowhere:" in err
    assert f"{FC2} forward: measured: nothing that overlaps is clearly faster" in err
    assert "(--no-tp-comm-overlap-rs)" in err
    assert f"{AG} acts" not in err


@pytest.mark.parametrize("verb", ["explain", "train"])
@pytest.mark.parametrize(
    ("damaged", "flags", "named"),
    [
        (put("passes", value=3), "", ["plan.json: passes must be a list, got 3"]),
        (
            put("passes", 0, "fields", "forward", value="rign:2"),
            "",
            ["plan.json: passes 0: fields: There is no overlap method rign:2"],
        ),
        (put("conditions", "batch", value=7), "", ["--tp-comm-plan", "--batch-size 7", "this run has 3"]),
        (None, "--no-tp-comm-overlap-ag", ["--tp-comm-plan", "ring:2", "switches turn off", "shiplap tune"]),
        (None, "--dtype bfloat16", ["--dtype float32", "this run has bfloat16", "shiplap tune"]),
        (None, f"{RS_DGRAD} --tp-comm-strict", [f"{RS_DGRAD} acts nowhere"]),
        (None, "--device cuda", ["--tp-comm-plan", "--device cpu", "this run has cuda"]),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused_before_workers_start(
    capsys: pytest.CaptureFixture[str], file: Path, no_workers: Path, *, verb: str, damaged: Any, flags: str,
    named: list[str],
) -> None:  # fmt: skip
    if damaged is not None:
        damage(file, damaged)
    assert main([verb, *RUN.split(), *flags.split(), "--tp-comm-plan", str(file)]) == 2
    err = capsys.readouterr().err
    for part in named:
        assert part in err, err
    assert "Traceback" not in err
    assert list(no_workers.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            "train gpt2 --tensor-parallel 2 --sequence-parallel --tp-comm-plan FILE",
            ["--tp-comm-plan", "needs --tp-com"],
        ),
        (f"train {RUN} --tp-comm-plan nothing.json", ["nothing.json: cannot read it: No such file"]),
        (
            f"train {RUN} --tp-comm-plan auto --deterministic",
            ["--tp-comm-plan auto", "--deterministic", "shiplap tune"],
        ),
        (
            f"train {RUN} --tp-comm-plan auto --tp-comm-plan-seconds 0.5",
            ["--tp-comm-plan-seconds", "at least 1", "0.5"],
        ),
        ("tune", ["name of a model", "gpt2"]),
        ("tune gpt2", ["tune measures", "--tp-comm-overlap", "--sequence-parallel"]),
        ("tune gpt2 --tensor-parallel 2 --sequence-parallel", ["tune measures", "--tp-comm-overlap"]),
        (f"tune {RUN} --tp-comm-plan FILE", ["tune makes a plan", "--tp-comm-plan"]),
        (f"tune {RUN} --tp-comm-plan auto", ["tune makes a plan", "--tp-comm-plan auto"]),
        (f"tune {RUN} --seconds 0", ["--seconds must be at least 1", "got 0"]),
        (f"tune {RUN} --nproc 3", ["3 ranks", "= 2"]),
        (f"tune {RUN} --output .", ["--output", "is a folder"]),
        (f"tune {RUN} --output FILE/plan.json", ["--output", "cannot write the plan"]),
        (f"tune {RUN} --hidden-size 33", ["33"]),
        (f"tune {RUN} --pipeline-parallel 2 --nproc 4", ["--pipeline-parallel 2"]),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], file: Path, no_workers: Path, *, arguments: str, named: list[str]
) -> None:
    assert main(arguments.replace("FILE", str(file)).split()) == 2
    out, err = capsys.readouterr()
    for part in named:
        assert part in err, err
    assert "Traceback" not in out + err
    assert list(no_workers.iterdir()) == []


def test_help_says_what_tune_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    assert "gpt2|llama3|qwen3|mixtral" in out
    assert "no overlap among them" in " ".join(out.split())


@pytest.mark.parametrize("plan", ["auto", "plan.json"])
def test_a_plan_needs_the_master_switch(plan: str) -> None:
    with pytest.raises(UserError, match=f"--tp-comm-plan {plan} .* needs --tp-comm-overlap"):
        TrainConfig(plan=PlanOptions(tp_comm_plan=plan))


def test_a_deterministic_run_may_use_a_file() -> None:
    """It is the measuring that is not deterministic."""
    config = run_of()
    deterministic = replace(config.run, deterministic=True)
    assert replace(config, run=deterministic, plan=PlanOptions(tp_comm_plan="plan.json")).run.deterministic
    with pytest.raises(UserError, match="--deterministic"):
        replace(config, run=deterministic, plan=PlanOptions(tp_comm_plan="auto"))


def test_tune_takes_what_train_takes() -> None:
    parallel = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
    config = TuneConfig(parallel=parallel, lora=LoraOptions(lora_rank=4), tune=TuneOptions(seconds=3.0))
    assert (config.tune.output, config.tune.seconds, config.tune.keep_fastest) == ("plan.json", 3.0, False)
