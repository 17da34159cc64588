"""Measured plans over several ranks: all find the same, training uses it, and what is wrong stops all of them."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shiplap import GlobalEnv, destroy_all_env, init_all_env
from shiplap.config import DataOptions, ModelOptions, ModelParallelConfig, TrainConfig
from shiplap.config.lora import LoraOptions
from shiplap.inspection.layers import parallel_layers
from shiplap.inspection.meta_model import skeleton
from shiplap.models.decoder import DecoderModel
from shiplap.tensor_parallel.low_rank import LowRankGemm
from shiplap.train.setup import resolve_structure
from shiplap.tuning import probe as probing
from shiplap.tuning.candidates import candidates
from shiplap.tuning.kinds import kinds_of
from shiplap.tuning.measured import MeasuredPlan
from shiplap.tuning.plan_file import read_plan
from shiplap.tuning.probe import Probe, Workload
from shiplap.tuning.run import conditions_of
from shiplap.tuning.tune import TuneSettings, tune
from tests.cases.memory import Storages
from tests.distributed.ranks import RankPool
from tests.distributed.test_explain import write_corpus
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]

SMALL = ModelOptions(num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=64)
CASES = {
    "gpt2": ("gpt2", LoraOptions()),
    "mixtral": ("mixtral", LoraOptions()),
    "adapters": ("gpt2", LoraOptions(lora_rank=4, lora_target_modules=("all-linear",))),
}


def config_of(case: str, size: int = 2) -> TrainConfig:
    """All switches on."""
    parallel = ModelParallelConfig(
        tensor_parallel_size=size, sequence_parallel=True, tp_comm_overlap=True, tp_comm_overlap_rs_dgrad=True
    )
    data = DataOptions(batch_size=2, sequence_length=16)
    return TrainConfig(parallel=parallel, model=SMALL, lora=CASES[case][1], data=data)


def bones_of(case: str, config: TrainConfig, env: GlobalEnv) -> DecoderModel:
    sizes, adapters = resolve_structure(CASES[case][0], config)
    return skeleton(CASES[case][0], config, model=sizes, adapters=adapters, rank=env.coordinate("tp"))


def tuned(case: str) -> tuple[MeasuredPlan, list[list[str]]]:
    """On one rank: a plan, and the candidates of each of its passes."""
    config = config_of(case)
    env = init_all_env(config.parallel, device="cpu")
    bones = bones_of(case, config, env)
    plan = tune(
        parallel_layers(bones),
        config.parallel,
        conditions=conditions_of(config, env.layout),
        env=env,
        settings=TuneSettings(seconds=1.5, compares_kept=case == "gpt2"),
        progress=lambda fraction, text: None,
    )
    plan.check(bones, config.parallel, plan.conditions)
    destroy_all_env()
    kinds = kinds_of(parallel_layers(bones))
    ways = [list(candidates(kind.layer, direction, config.parallel)) for kind in kinds for direction in kind.directions]
    return plan, ways


@pytest.mark.parametrize(("case", "num_ranks"), [("gpt2", 2), ("mixtral", 2), ("adapters", 2), ("adapters", 4)])
def test_all_ranks_find_the_same(ranks: Ranks, case: str, num_ranks: int) -> None:
    """Replicas too, which measure at the same time."""
    (plan, ways), *others = ranks(num_ranks).run(tuned, case)
    assert all(list(plan.passes) == list(other.passes) for other, _ in others)
    assert plan.conditions.data_parallel == num_ranks // 2
    assert len(plan.passes) == len(ways) >= 8
    for measured, names in zip(plan.passes, ways, strict=True):
        # If time is short some are left out, the last ones.
        assert len(measured.timings) >= min(2, len(names))
        assert list(measured.timings) == names[: len(measured.timings)]
        assert measured.method in measured.timings
        assert all(timing.median_ms > 0 for timing in measured.timings.values())
    assert sum(measured.kept is not None for measured in plan.passes) == (3 if case == "gpt2" else 0)


def communication(calls: list[str]) -> Counter[str]:
    return Counter(call for call in calls if call.startswith("c10d."))


def products(calls: list[str]) -> list[str]:
    return [call for call in calls if re.search(r"\b_?(mm|bmm|addmm|baddbmm|grouped_mm)\b", call)]


def run_alone(case: str) -> tuple[list[str], int]:
    """On one rank: each kind of layer with its products alone and with its communication alone; what is wrong."""
    config = config_of(case)
    env = init_all_env(config.parallel, device="cpu")
    wrong, num_runs = [], 0

    def calls_of(run: Callable[[], object]) -> list[str]:
        nonlocal num_runs
        num_runs += 1
        mode = Storages()
        with mode:
            run()
        return mode.calls

    with (
        patch.object(probing, "slowest_rank", lambda milliseconds, _: milliseconds),
        patch.object(probing.Repeats, "milliseconds", lambda _, __, time_it: time_it(1)),
    ):
        for kind in kinds_of(parallel_layers(bones_of(case, config, env))):
            probe = Probe(kind.layer, Workload(sequence=16, batch=2, dtype="float32"), env)
            for direction in kind.directions:
                calls = calls_of(lambda: probe.products_milliseconds(direction))  # noqa: B023 - called here
                if communication(calls) or not products(calls):
                    wrong.append(f"{kind.paths[0]} {direction} products: {calls}")
                for name, plan in candidates(kind.layer, direction, config.parallel).items():
                    whole = calls_of(lambda: probe.milliseconds(direction, plan))  # noqa: B023
                    with patch.object(LowRankGemm, "forward"), patch.object(LowRankGemm, "dgrad"):
                        alone = calls_of(lambda: probe.communication_milliseconds(direction, plan))  # noqa: B023
                        assert not LowRankGemm.forward.called  # type: ignore[attr-defined]
                        assert not LowRankGemm.dgrad.called  # type: ignore[attr-defined]
                    if communication(alone) != communication(whole) or not communication(whole):
                        wrong.append(f"{kind.paths[0]} {direction} {name}: {communication(alone)} of {whole}")
                    # h of an adapter is made outside the layer's product.
                    if products(alone) and kind.layer.adapter is None:
                        wrong.append(f"{kind.paths[0]} {direction} {name}: {products(alone)}")
                    if len(products(alone)) >= len(products(whole)):
                        wrong.append(f"{kind.paths[0]} {direction} {name}: multiplies as much as with products")
    destroy_all_env()
    return wrong, num_runs


@pytest.mark.parametrize("case", CASES)
def test_products_alone_send_nothing_and_communication_alone_multiplies_nothing(ranks: Ranks, case: str) -> None:
    for wrong, num_runs in ranks(2).run(run_alone, case):
        assert not wrong, "\n".join(wrong)
        assert num_runs > 50


def every_candidate(size: int) -> dict[str, float]:
    """On one rank: milliseconds of all that is measured of a feed-forward layer."""
    config = config_of("gpt2", size)
    env = init_all_env(config.parallel, device="cpu")
    times = {}
    for kind in kinds_of(parallel_layers(bones_of("gpt2", config, env))):
        if ".mlp." in kind.paths[0]:
            probe = Probe(kind.layer, Workload(sequence=16, batch=2, dtype="bfloat16"), env)
            for direction in kind.directions:
                for name, plan in candidates(kind.layer, direction, config.parallel).items():
                    times[f"{kind.layer.kind} {direction} {name}"] = probe.milliseconds(direction, plan)
    destroy_all_env()
    return times


def test_every_candidate_runs_on_four_ranks(ranks: Ranks) -> None:
    first, *others = ranks(4).run(every_candidate, 4)
    assert all(times == first for times in others)
    assert all(time > 0 for time in first.values())
    for place in ("column forward", "row backward"):
        assert {f"{place} shards_per_gemm", f"{place} shards_per_gemm:1,3", f"{place} feature_chunks:8"} <= first.keys()


SIZES = (
    "gpt2 --vocab-size 257 --num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--max-sequence-length 32 --sequence-length 15 --batch-size 2 --tensor-parallel 2 --sequence-parallel"
)
OVERLAP = "--tp-comm-overlap --tp-comm-overlap-rs-dgrad"
QUICK = f"tune {SIZES} {OVERLAP} --seconds 1"
PIPELINES = {
    ("column", "forward"): {"forward": "ring:4"},
    ("column", "backward"): {"dgrad": "row_chunks", "wgrad": "bulk", "keeps": "shard"},
    ("row", "forward"): {"forward": "row_chunks"},
    ("row", "backward"): {"dgrad": "ring:2"},
}


@pytest.fixture(scope="module")
def plan_file(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for this run, measured in a second."""
    path = tmp_path_factory.mktemp("plan") / "new" / "plan.json"
    (code, out, err), other = ranks(2).run(command, [f"{QUICK} --output {path}"])
    assert (code, other) == (0, (0, "", "")), err
    assert len(re.findall(r"^\S+ +(?:for|back)ward ", out, re.MULTILINE)) == 10
    assert out.endswith(f"plan written: {path}\n")
    assert "2 ranks: TP 2 × DP 1 × PP 1" in out
    assert "tune: 100 %, done" in err
    assert len(read_plan(path).passes) == 10
    return path


def test_a_second_is_too_little_and_it_says_so(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    assert not all(measured.is_clear for measured in plan.passes)
    conditions = plan.conditions
    assert (conditions.tensor_parallel, conditions.sequence, conditions.batch) == (2, 16, 2)


def losses(results: list[tuple[int, str, str]], folder: Path) -> list[float]:
    assert [code for code, _, _ in results] == [0, 0], results
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("train_loss", "val_loss") if key in line]


def with_pipelines(path: Path, to: Path) -> Path:
    """The plan with a pipeline everywhere, whatever was the fastest."""
    content = json.loads(path.read_text())
    for measured in content["passes"]:
        measured["fields"] = PIPELINES[measured["layer"]["kind"], measured["direction"]]
    to.write_text(json.dumps(content))
    return to


def test_training_with_a_plan_computes_the_same(ranks: Ranks, plan_file: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    # Samples are short sequences: there are more chunks than rows.
    flags = "--num-iteration 3 --learning-rate 1e-2 --val-loss-every 3 --sample-every 3 --sample-num-tokens 3"
    train = f"train {SIZES} {flags} --data {corpus} --run-dir {tmp_path}"
    plain = losses(ranks(2).run(command, [f"{train}/plain"]), tmp_path / "plain")
    pipelines = with_pipelines(plan_file, tmp_path / "pipelines.json")
    for name, plan in (("tuned", plan_file), ("pipelines", pipelines)):
        results = ranks(2).run(command, [f"{train}/{name} {OVERLAP} --tp-comm-plan {plan}"])
        # Sums in another order; three steps of AdamW make the difference grow.
        assert losses(results, tmp_path / name) == pytest.approx(plain, rel=1e-5)
        out = results[0][1]
        assert f"plan: --tp-comm-plan {plan}, measured 20" in out
        if name == "pipelines":
            assert re.search(r"mlp\.fc1 +forward .* ring:4 .* the forward product, measured\n", out)
            assert re.search(r" dgrad +reduce-scatter dx +row_chunks .* the dgrad product, measured\n", out)
            assert out.count(", measured\n") == 13
        shown = ranks(2).run(command, [f"explain {SIZES} {OVERLAP} --tp-comm-plan {plan} --json"])
        assert [code for code, _, _ in shown] == [0, 0]
        sites = [json.loads(line) for line in shown[0][1].splitlines()]
        assert {site["is_measured"] for site in sites} == {True}
        # What is explained is what training shows.
        assert all(re.search(rf" {re.escape(site['method'])} ", out) for site in sites)


def with_cache(arguments: list[str], folder: str, measuring: str) -> tuple[int, str, str]:
    """As `command`, with a cache of its own; `measuring` may be `forbidden`."""
    forbidden = AssertionError("it is measured")
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        if measuring == "allowed":
            return command(arguments)
        with patch("shiplap.tuning.run.tune", side_effect=forbidden):
            return command(arguments)


def test_auto_measures_once_and_keeps_what_it_found(ranks: Ranks, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    train = f"train {SIZES} --num-iteration 1 --data {write_corpus(tmp_path)} --run-dir {tmp_path}"
    auto = f"{OVERLAP} --tp-comm-plan auto --tp-comm-plan-seconds 1"
    plain = losses(ranks(2).run(command, [f"{train}/plain"]), tmp_path / "plain")
    first = ranks(2).run(with_cache, [f"{train}/first {auto}"], str(cache), "allowed")
    assert losses(first, tmp_path / "first") == pytest.approx(plain, rel=1e-6)
    (file,) = (cache / "shiplap" / "plans").iterdir()
    assert len(read_plan(file).passes) == 10
    again = ranks(2).run(with_cache, [f"{train}/again {auto}"], str(cache), "forbidden")
    assert losses(again, tmp_path / "again") == losses(first, tmp_path / "first")
    for results in (first, again):
        assert f"plan: {file}, measured 20" in results[0][1]
        assert "  not clear, so without overlap: " in results[0][1]
        assert results[1][1:] == ("", "")
    assert "measuring what overlaps best: 100 %" in first[0][2]
    assert again[0][2] == ""

    # Strictness knows of the plan, too.
    damaged = json.loads(file.read_text())
    for measured in damaged["passes"]:
        whole = {"wgrad": "whole"} if measured["layer"]["kind"] == "row" else {}
        nothing = {site: "sequential" for site in measured["fields"] if site != "keeps"}
        measured["fields"] = nothing | {site: value for site, value in whole.items() if site in nothing}
    file.write_text(json.dumps(damaged))
    # What cannot be used is named on every rank at once, with what to do about it.
    for content, named in (
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "is no measured plan"),
        (json.dumps(damaged | {"passes": [{"direction": "up"}]}), "passes 0: layer: kind is missing"),
        (json.dumps(damaged | {"passes": damaged["passes"][1:]}), "nothing about layers like blocks.0.attention.qkv"),
    ):
        file.write_text(content)
        results = ranks(2).run(with_cache, [f"{train}/none {auto}"], str(cache), "forbidden")
        assert [code for code, _, _ in results] == [2, 2]
        assert all(part in results[0][2] for part in (str(file), named, "remove it to measure again")), results[0][2]
        assert results[1][1:] == ("", "")
    assert not (tmp_path / "none").exists()


def test_a_cache_that_cannot_be_written_is_known_before_measuring(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    flags = f"{OVERLAP} --tp-comm-plan auto --num-iteration 1 --data {corpus} --run-dir {tmp_path}/run"
    results = ranks(2).run(with_cache, [f"train {SIZES} {flags}"], str(corpus), "forbidden")
    assert [code for code, _, _ in results] == [2, 2]
    assert f"rank 0: {corpus}/shiplap/plans/" in results[0][2]
    assert "cannot write the plan" in results[0][2]
    assert results[1][1:] == ("", "")


def in_own_folder(arguments: list[str], folders: list[str]) -> tuple[int, str, str]:
    """As `command`, each rank in a folder of its own."""
    with chdir(folders[dist.get_rank()]):
        return command(arguments)


@pytest.mark.parametrize(("verb", "folder_flag"), [("train", "--run-dir"), ("bench", "--bench-dir")])
def test_ranks_that_have_different_plans_all_stop(
    ranks: Ranks, plan_file: Path, tmp_path: Path, *, verb: str, folder_flag: str
) -> None:
    """As on hosts whose files differ."""
    folders = [tmp_path / "host 0", tmp_path / "host 1"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "plan.json").write_text(plan_file.read_text())
    flags = f"{SIZES} {OVERLAP} --data {write_corpus(tmp_path)} --tp-comm-plan plan.json"
    run = f"{verb} {flags} {folder_flag} {tmp_path}/run"
    other = folders[1] / "plan.json"
    for named in ("differ in --tp-comm-plan plan.json: rank 0: 'measured 20", "rank 1: plan.json: cannot read it"):
        if "differ" in named:
            with_pipelines(plan_file, other)
        else:
            other.unlink()
        results = ranks(2).run(in_own_folder, [run], list(map(str, folders)))
        assert [code for code, _, _ in results] == [2, 2], results
        assert named in results[0][2]
        assert len(results[0][2]) < 400, "the whole plan is shown"
        assert results[1][1:] == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"tune {SIZES}", ["tune measures what may overlap", "--tp-comm-overlap"]),
        (f"train {SIZES} {OVERLAP} --tp-comm-plan auto --deterministic", ["--tp-comm-plan auto", "--deterministic"]),
    ],
)
def test_what_contradicts_itself_is_refused_by_each_rank(ranks: Ranks, arguments: str, named: list[str]) -> None:
    results = ranks(2).run(command, [arguments])
    assert [code for code, _, _ in results] == [2, 2]
    assert all(part in err for part in named for _, _, err in results)


def test_a_place_that_rank_0_cannot_write_stops_all_before_measuring(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    results = ranks(2).run(command, [f"{QUICK} --output {file}/plan.json"])
    assert [code for code, _, _ in results] == [2, 2]
    assert f"rank 0: --output {file}/plan.json: cannot write the plan" in results[0][2]
    assert results[1][1:] == ("", "")


def test_what_a_rank_raises_ends_the_job_with_the_rank_named(tmp_path: Path) -> None:
    """In workers that `tune` starts itself; the other rank is in the middle of a ring, waiting."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from shiplap.overlap.by_shard import RING\n"
        "    def broken(*arguments, **numbers):\n"
        "        raise RuntimeError('a link is down')\n"
        "    object.__setattr__(RING, 'gather', broken)\n"
    )
    arguments = f"{QUICK} --output {tmp_path}/plan.json".split()
    process = subprocess.run(
        [sys.executable, "-m", "shiplap", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        timeout=120,
    )
    assert process.returncode == 1
    assert "RuntimeError: a link is down" in process.stderr
    assert "tune:   0 %, making the layers" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("shiplap: error: rank 1 failed")
    assert not (tmp_path / "plan.json").exists()
