"""What `shiplap explain` says: each reason for not overlapping, sizes, the table, JSON, and what strictness refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiplap.commands.explain import as_text, explain
from shiplap.commands.main import main
from shiplap.config import DataOptions, ModelOptions, ModelParallelConfig, RunOptions, TrainConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.site_table import in_bytes, site_table
from shiplap.inspection.sites import Reason, Site, sites_of_run
from shiplap.inspection.strict import check_strict, not_acting
from shiplap.models.decoder import DecoderModel
from shiplap.overlap.plan import ColumnPlan, RowPlan
from shiplap.overlap.registry import SEQUENTIAL
from shiplap.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from shiplap.train.setup import resolve_structure

SMALL = ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
QKV, PROJ, FC1, FC2 = (f"blocks.*.{name}" for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"))
HEAD = "head.projection"
PLAIN = {"tensor_parallel_size": 1, "sequence_parallel": False, "tp_comm_overlap": False}
NO_SP = {"sequence_parallel": False, "tp_comm_overlap": False}
MASTER_OFF = {"tp_comm_overlap": False}
NO_BULK = {"tp_comm_bulk_wgrad": False, "tp_comm_bulk_dgrad": False}


def run_of(*, lora: LoraOptions | None = None, model: ModelOptions = SMALL, **switches: Any) -> TrainConfig:
    """A small run on two ranks with overlap, but for what is said."""
    asked = {"tensor_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True} | switches
    return TrainConfig(
        parallel=ModelParallelConfig(**asked),
        model=model,
        data=DataOptions(batch_size=3, sequence_length=15),
        lora=lora or LoraOptions(),
    )


def model_of(config: TrainConfig) -> DecoderModel:
    sizes, adapters = resolve_structure("gpt2", config)
    return skeleton("gpt2", config, model=sizes, adapters=adapters)


def by_place(sites: list[Site]) -> dict[str, Site]:
    return {f"{site.layer} {site.site}": site for site in sites}


def at(place: str, config: TrainConfig) -> Site:
    return by_place(explain("gpt2", config))[place]


@pytest.mark.parametrize(
    ("switches", "place", "method", "behind", "switch"),
    [
        ({}, f"{QKV} forward", "ring", "forward", "--tp-comm-overlap-ag"),
        ({}, f"{QKV} dgrad", "bulk", "wgrad", "--tp-comm-bulk-dgrad"),
        ({}, f"{HEAD} wgrad", "bulk", "dgrad", "--tp-comm-bulk-wgrad"),
        ({}, f"{PROJ} forward", "p2p", "forward", "--tp-comm-overlap-rs"),
        ({}, f"{FC2} dgrad", "ring", "dgrad", "--tp-comm-overlap-ag"),
        ({"tp_comm_overlap_rs_dgrad": True}, f"{FC1} dgrad", "p2p", "dgrad", "--tp-comm-overlap-rs-dgrad"),
        # Disabled here, so bulk has its place back.
        (
            {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_fc1": True},
            f"{FC1} dgrad",
            "bulk",
            "wgrad",
            "--tp-comm-bulk-dgrad",
        ),
    ],
)
def test_what_overlaps(switches: dict[str, Any], place: str, *, method: str, behind: str, switch: str) -> None:
    site = at(place, run_of(**switches))
    assert (site.method, site.hidden_behind, site.switch) == (method, behind, switch)
    assert (site.reason, site.why_not, site.is_plan_replaced) == (None, "", False)


@pytest.mark.parametrize(
    ("switches", "place", "communicates", "reason", "why_not"),
    [
        (PLAIN, f"{QKV} forward", "nothing", Reason.TP_1, "TP 1"),
        (PLAIN, f"{FC2} forward", "nothing", Reason.TP_1, "TP 1"),
        (NO_SP, f"{QKV} wgrad", "nothing", Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism: nothing to gather"),
        (NO_SP, f"{FC2} dgrad", "nothing", Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism: nothing to gather"),
        (NO_SP, f"{QKV} dgrad", "all-reduce dx", Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism"),
        (NO_SP, f"{FC2} forward", "all-reduce y", Reason.NO_SEQUENCE_PARALLEL, "no sequence parallelism"),
        (MASTER_OFF, f"{QKV} forward", "all-gather x", Reason.MASTER_SWITCH_OFF, "--tp-comm-overlap is off"),
        (MASTER_OFF, f"{FC2} dgrad", "all-gather dy", Reason.MASTER_SWITCH_OFF, "--tp-comm-overlap is off"),
        (
            {"tp_comm_overlap_ag": False},
            f"{FC2} dgrad",
            "all-gather dy",
            Reason.SWITCH_OFF,
            "--tp-comm-overlap-ag is off",
        ),
        (
            {"tp_comm_overlap_rs": False},
            f"{FC2} forward",
            "reduce-scatter y",
            Reason.SWITCH_OFF,
            "--tp-comm-overlap-rs is off",
        ),
        (NO_BULK, f"{HEAD} wgrad", "all-gather x", Reason.SWITCH_OFF, "--tp-comm-bulk-wgrad is off"),
        (
            NO_BULK,
            f"{HEAD} dgrad",
            "reduce-scatter dx",
            Reason.SWITCH_OFF,
            "--tp-comm-overlap-rs-dgrad and --tp-comm-bulk-dgrad are off",
        ),
        (
            {"tp_comm_overlap_disable_qkv": True},
            f"{QKV} forward",
            "all-gather x",
            Reason.LAYER_DISABLED,
            "--tp-comm-overlap-disable-qkv is on",
        ),
        (
            NO_BULK | {"tp_comm_overlap_disable_fc1": True, "tp_comm_overlap_rs_dgrad": True},
            f"{FC1} dgrad",
            "reduce-scatter dx",
            Reason.LAYER_DISABLED,
            "--tp-comm-overlap-disable-fc1 is on, --tp-comm-bulk-dgrad is off",
        ),
        # Without the pipeline's switch, disabling the layer is not the reason.
        (
            NO_BULK | {"tp_comm_overlap_disable_fc1": True},
            f"{FC1} dgrad",
            "reduce-scatter dx",
            Reason.SWITCH_OFF,
            "--tp-comm-overlap-rs-dgrad and --tp-comm-bulk-dgrad are off",
        ),
        (
            {"tp_comm_keep_gathered": True},
            f"{QKV} wgrad",
            "nothing",
            Reason.KEPT_GATHERED,
            "x is kept as gathered in forward, by --tp-comm-keep-gathered",
        ),
    ],
)
def test_why_switches_do_not_overlap(
    switches: dict[str, Any], place: str, *, communicates: str, reason: Reason, why_not: str
) -> None:
    site = at(place, run_of(**switches))
    assert (site.communicates, site.reason, site.why_not) == (communicates, reason, why_not)
    assert (site.hidden_behind, site.switch) == (None, None)
    assert (site.bytes_per_rank_and_micro_batch == 0) == (communicates == "nothing")


LORA_AT_FC2 = LoraOptions(lora_rank=4, lora_target_modules=("blocks.1.mlp.fc2",))


@pytest.mark.parametrize(
    ("place", "communicates", "reason", "why_not"),
    [
        # Nothing before the adapter of block 1 is trained, so backward ends there.
        (
            "blocks.0-1.attention.qkv dgrad",
            "nothing",
            Reason.INPUT_WITHOUT_GRADIENT,
            "nothing before it is trained: no dgrad",
        ),
        (
            "blocks.0-1.attention.proj dgrad",
            "nothing",
            Reason.INPUT_WITHOUT_GRADIENT,
            "nothing here or before it is trained",
        ),
        ("blocks.0.mlp.fc2 dgrad", "nothing", Reason.INPUT_WITHOUT_GRADIENT, "nothing here or before it is trained"),
        ("blocks.2.mlp.fc1 wgrad", "nothing", Reason.FROZEN_WEIGHT, "frozen weight: no wgrad, nothing to gather"),
        (
            "blocks.2.mlp.fc1 dgrad",
            "reduce-scatter dx",
            Reason.NOTHING_TO_HIDE_BEHIND,
            "frozen weight: no wgrad to hide behind",
        ),
        ("blocks.1-2.mlp.fc2 dgrad", "all-gather dy", None, ""),
        (f"{HEAD} wgrad", "nothing", Reason.FROZEN_WEIGHT, "frozen weight: no wgrad, nothing to gather"),
    ],
)
def test_what_frozen_weights_change(place: str, *, communicates: str, reason: Reason | None, why_not: str) -> None:
    site = at(place, run_of(lora=LORA_AT_FC2))
    assert (site.communicates, site.reason, site.why_not) == (communicates, reason, why_not)


def test_an_adapter_travels_with_its_layer_and_gathers_nothing_again() -> None:
    adapted = LoraOptions(lora_rank=4, lora_target_modules=("q_proj", "v_proj"))
    llama = replace(SMALL, num_key_value_heads=2)
    sites = by_place(explain("llama3", run_of(lora=adapted, model=llama)))
    forward, dgrad, wgrad = (sites[f"{QKV} {name}"] for name in ("forward", "dgrad", "wgrad"))
    # A rank sends its shard, 8 of 16 tokens of 3 sequences: 32 values and two adapters' 4 in float32.
    assert forward.message_bytes_per_rank == dgrad.message_bytes_per_rank == 8 * 3 * (32 + 2 * 4) * 4
    assert dgrad.hidden_behind == "adapter wgrad"
    assert (wgrad.communicates, wgrad.reason) == ("nothing", Reason.FROZEN_WEIGHT)
    assert sites[f"{FC1} forward"].message_bytes_per_rank == 8 * 3 * 32 * 4


def columns(model: DecoderModel) -> list[ColumnParallelLinear]:
    return [module for module in model.modules() if isinstance(module, ColumnParallelLinear)]


def rows(model: DecoderModel) -> list[RowParallelLinear]:
    return [module for module in model.modules() if isinstance(module, RowParallelLinear)]


@pytest.mark.parametrize(
    ("plan", "site", "behind", "reason", "why_not"),
    [
        (
            ColumnPlan(forward="sequential", dgrad="bulk", wgrad="bulk"),
            "forward",
            None,
            Reason.PLAN_REPLACED,
            "plan replaced: the switches say ring",
        ),
        (ColumnPlan(forward="ring:2", dgrad="bulk", wgrad="bulk"), "forward", "forward", None, ""),
        (ColumnPlan(forward="shards_per_gemm:1,1", dgrad="bulk", wgrad="bulk"), "forward", "forward", None, ""),
        (
            ColumnPlan(forward="shards_per_gemm:2", dgrad="bulk", wgrad="bulk"),
            "forward",
            None,
            Reason.NOTHING_TO_HIDE_BEHIND,
            "shards_per_gemm:2 has one product, which needs everything",
        ),
        (ColumnPlan(forward="ring", dgrad="p2p:4", wgrad="bulk"), "dgrad", "dgrad", None, ""),
        (ColumnPlan(forward="ring", dgrad="bulk", wgrad="ring:2"), "wgrad", "wgrad", None, ""),
        (
            ColumnPlan(forward="ring", dgrad="bulk", wgrad="bulk", keeps="gathered"),
            "wgrad",
            None,
            Reason.KEPT_GATHERED,
            "x is kept as gathered in forward, by a replaced plan",
        ),
    ],
)
def test_a_replaced_plan_shows(
    plan: ColumnPlan, site: str, *, behind: str | None, reason: Reason | None, why_not: str
) -> None:
    config = run_of()
    model = model_of(config)
    columns(model)[1].plan = plan  # FC1 of block 0
    sites = by_place(sites_of_run(model, config))
    replaced, others = sites[f"blocks.0.mlp.fc1 {site}"], sites[f"blocks.1-2.mlp.fc1 {site}"]
    assert (replaced.hidden_behind, replaced.reason, replaced.why_not) == (behind, reason, why_not)
    assert (replaced.is_plan_replaced, replaced.switch, replaced.num_layers) == (True, None, 1)
    assert (others.is_plan_replaced, others.num_layers) == (False, 2)
    assert ("plan replaced" in site_table([replaced])) == (reason in (None, Reason.PLAN_REPLACED))


def test_bulk_in_a_row_layer_hides_behind_nothing() -> None:
    config = run_of()
    model = model_of(config)
    rows(model)[0].plan = RowPlan(forward="bulk", dgrad="ring")
    site = by_place(sites_of_run(model, config))["blocks.0.attention.proj forward"]
    assert (site.hidden_behind, site.reason) == (None, Reason.NOTHING_TO_HIDE_BEHIND)


def test_a_layer_that_was_made_without_pipelines_says_so() -> None:
    config = run_of()
    model = model_of(config)
    head = columns(model)[-1]
    head.disable_tp_comm_pipeline = True
    head.plan = replace(head.plan, forward=SEQUENTIAL)
    site = by_place(sites_of_run(model, config))[f"{HEAD} forward"]
    assert (site.reason, site.why_not) == (
        Reason.LAYER_DISABLED,
        "the layer's own disable_tp_comm_pipeline is on",
    )


@pytest.mark.parametrize(
    ("switches", "dtype", "place", "expected"),
    [
        # 15 tokens of 3 sequences are padded to 16; 32 values; a gather or scatter sends (R - 1) / R of it.
        ({}, "float32", f"{QKV} forward", 16 * 3 * 32 * 4 // 2),
        ({}, "bfloat16", f"{FC2} forward", 16 * 3 * 32 * 2 // 2),
        ({"tensor_parallel_size": 4}, "float32", f"{HEAD} dgrad", 16 * 3 * 32 * 4 * 3 // 4),
        # Nothing is padded, and an all-reduce sends twice as much.
        (NO_SP, "float32", f"{QKV} dgrad", 15 * 3 * 32 * 4),
    ],
)
def test_sizes(switches: dict[str, Any], dtype: str, *, place: str, expected: int) -> None:
    config = replace(run_of(**switches), run=RunOptions(dtype=dtype))  # type: ignore[arg-type]
    site = at(place, config)
    assert site.message_bytes_per_rank == expected
    assert site.bytes_per_rank_and_micro_batch == expected * site.num_layers


def test_recomputed_blocks_communicate_forward_twice() -> None:
    config = run_of(model=replace(SMALL, recompute="full"))
    sites = explain("gpt2", config)
    twice = {f"{s.layer} {s.site}" for s in sites if s.messages_per_micro_batch == 2}
    assert twice == {f"{layer} forward" for layer in (QKV, PROJ, FC1, FC2)}
    assert "2 × 3.0 KiB" in site_table(sites)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1048575, "1.0 MiB"), (5 * 2**29, "2.5 GiB")]
)
def test_numbers_of_bytes(count: int, text: str) -> None:
    assert in_bytes(count) == text


GOLDEN = """\
gpt2, TP 2 + SP, float32, micro-batch of 3 × 15 tokens (padded to 16)
bytes/rank: what each rank sends in one message of one layer

layer                        site     communicates       method      bytes/rank  hidden behind, or why not
blocks.*.attention.qkv × 3   forward  all-gather x       sequential     3.0 KiB  --tp-comm-overlap-disable-qkv is on
                             dgrad    reduce-scatter dx  sequential     3.0 KiB  --tp-comm-overlap-disable-qkv is on,
                                                                                 --tp-comm-bulk-dgrad is off
                             wgrad    all-gather x       bulk           3.0 KiB  the dgrad product
blocks.*.attention.proj × 3  forward  reduce-scatter y   p2p            3.0 KiB  the forward product
                             dgrad    all-gather dy      ring           3.0 KiB  the dgrad product
blocks.*.mlp.fc1 × 3         forward  all-gather x       ring           3.0 KiB  the forward product
                             dgrad    reduce-scatter dx  p2p            3.0 KiB  the dgrad product
                             wgrad    all-gather x       bulk           3.0 KiB  the dgrad product
blocks.*.mlp.fc2 × 3         forward  reduce-scatter y   p2p            3.0 KiB  the forward product
                             dgrad    all-gather dy      ring           3.0 KiB  the dgrad product
head.projection              forward  all-gather x       ring           3.0 KiB  the forward product
                             dgrad    reduce-scatter dx  p2p            3.0 KiB  the dgrad product
                             wgrad    all-gather x       bulk           3.0 KiB  the dgrad product

81.0 KiB of 99.0 KiB sent by each rank in a micro-batch overlap with a product."""


def test_the_table() -> None:
    config = run_of(tp_comm_overlap_disable_qkv=True, tp_comm_overlap_rs_dgrad=True, tp_comm_bulk_dgrad=False)
    assert as_text("gpt2", config, explain("gpt2", config)) == GOLDEN
    assert max(map(len, GOLDEN.splitlines())) <= 120


def test_without_a_width_every_site_has_one_line() -> None:
    config = run_of(tp_comm_overlap_disable_qkv=True, tp_comm_overlap_rs_dgrad=True, tp_comm_bulk_dgrad=False)
    sites = explain("gpt2", config)
    assert len(site_table(sites).splitlines()) == 1 + len(sites) == 14


RS_DGRAD, BULK_DGRAD, BULK_WGRAD = "--tp-comm-overlap-rs-dgrad", "--tp-comm-bulk-dgrad", "--tp-comm-bulk-wgrad"
KEEP, DISABLE_QKV = "--tp-comm-keep-gathered", "--tp-comm-overlap-disable-qkv"
ALL_FROZEN = LoraOptions(lora_rank=4, lora_target_modules=("fc2",))


@pytest.mark.parametrize(
    ("switches", "lora", "idle"),
    [
        ({}, None, {}),
        # The defaults ask for nothing without the master switch.
        (MASTER_OFF, None, {}),
        (PLAIN, None, {}),
        (MASTER_OFF | {"tp_comm_overlap_rs_dgrad": True}, None, {RS_DGRAD: "--tp-comm-overlap is off"}),
        (NO_SP | {"tp_comm_overlap_rs_dgrad": True}, None, {RS_DGRAD: "no sequence parallelism"}),
        (MASTER_OFF | {"tp_comm_overlap_disable_qkv": True}, None, {DISABLE_QKV: "--tp-comm-overlap is off"}),
        (
            {"tp_comm_overlap_ag": False, "tp_comm_overlap_disable_qkv": True},
            None,
            {DISABLE_QKV: "forward: no pipeline to keep off, --tp-comm-overlap-ag is off"},
        ),
        ({"tp_comm_overlap_disable_qkv": True}, None, {}),
        # No pipeline but that of a dgrad which nothing needs; bulk is off, so that it is the only thing idle.
        (
            NO_BULK
            | {"tp_comm_overlap_ag": False, "tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True},
            LoraOptions(lora_rank=4, lora_target_modules=("blocks.2.mlp.fc2",)),
            {DISABLE_QKV: "blocks.*.attention.qkv dgrad: no pipeline to keep off, nothing before it is trained"},
        ),
        # Their places are taken, as the options' help says.
        ({"tp_comm_overlap_rs_dgrad": True}, None, {}),
        ({"tp_comm_keep_gathered": True}, None, {}),
        ({}, ALL_FROZEN, {BULK_WGRAD: "no wgrad, nothing to gather", BULK_DGRAD: "no wgrad to hide behind"}),
        (NO_BULK, ALL_FROZEN, {}),
        (NO_BULK | {"tp_comm_keep_gathered": True}, ALL_FROZEN, {KEEP: "frozen weight"}),
    ],
)
def test_what_is_asked_for_and_does_not_act(
    switches: dict[str, Any], *, lora: LoraOptions | None, idle: dict[str, str]
) -> None:
    config = run_of(lora=lora, **switches)
    found = not_acting(config.parallel, explain("gpt2", config))
    assert found.keys() == idle.keys()
    for flag, why in idle.items():
        assert any(why in place for place in found[flag]), found[flag]


def test_a_pipeline_that_every_layer_disables_is_refused() -> None:
    config = run_of(tp_comm_overlap_rs_dgrad=True, tp_comm_strict=True)
    model = model_of(config)
    check_strict(config.parallel, sites_of_run(model, config))
    for layer in columns(model):
        layer.disable_tp_comm_pipeline = True
        layer.plan = ColumnPlan(forward="sequential", dgrad="bulk", wgrad="bulk")
    with pytest.raises(UserError) as refused:
        check_strict(config.parallel, sites_of_run(model, config))
    message = str(refused.value)
    assert f"{RS_DGRAD} acts nowhere:\n    {QKV} dgrad: the layer's own disable_tp_comm_pipeline is on" in message
    assert "--no-tp-comm-overlap-rs-dgrad)" in message


def test_overlap_by_a_replaced_plan_is_no_switch_s() -> None:
    config = run_of()
    model = model_of(config)
    for layer in rows(model):
        layer.plan = RowPlan(forward="reduce", dgrad="ring")
    assert not_acting(config.parallel, sites_of_run(model, config)) == {
        "--tp-comm-overlap-rs": [f"{layer} forward: plan replaced by reduce" for layer in (PROJ, FC2)]
    }


ON_TWO_RANKS = "--tensor-parallel 2 --sequence-parallel --tp-comm-overlap --num-layers 2"


@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3", "mixtral"])
def test_the_verb_shows_every_family(capsys: pytest.CaptureFixture[str], family: str) -> None:
    assert main(["explain", family, *ON_TWO_RANKS.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{family}, TP 2 + SP, float32, ")
    for layer in (QKV, PROJ, FC1, FC2):
        assert f"\n{layer} × 2 " in out
    assert "\nhead.projection " in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_verb_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gpt2", *ON_TWO_RANKS.split(), "--json", "--batch-size", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 13
    assert lines[0] == {
        "layer": QKV,
        "num_layers": 2,
        "kind": "column",
        "site": "forward",
        "communicates": "all-gather x",
        "method": "ring",
        "hidden_behind": "forward",
        "switch": "--tp-comm-overlap-ag",
        "disabled_by": None,
        "is_plan_replaced": False,
        "is_measured": False,
        "reason": None,
        "why_not": "",
        "message_bytes_per_rank": 64 * 2 * 128 * 4,
        "messages_per_micro_batch": 1,
        "bytes_per_rank_and_micro_batch": 2 * 64 * 2 * 128 * 4,
    }


def test_a_large_model_is_explained_without_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--tensor-parallel 8 --sequence-parallel --tp-comm-overlap --preset llama3-8b --dtype bfloat16"
    assert main(["explain", "llama3", *flags.split(), "--sequence-length", "8192", "--batch-size", "1"]) == 0
    # 8192 × 4096 values of two bytes, of which seven ranks' shards are sent.
    assert "56.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["explain", "train"])
def test_strictness_refuses_with_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f"{ON_TWO_RANKS} --lora-rank 4 --lora-target-modules fc2 --tp-comm-strict --no-tp-comm-bulk-dgrad"
    assert main([verb, "gpt2", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert f"{BULK_WGRAD} acts nowhere:\n    blocks.0.attention.qkv wgrad: frozen weight" in err
    assert "(--no-tp-comm-bulk-wgrad)" in err
    # The table that says why comes first; training has not begun.
    assert ("hidden behind" in out) == (verb == "explain")
    assert "step 1/" not in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["name of a model", "gpt2"]),
        ("gpt3", ["gpt3", "did you mean gpt2"]),
        ("gpt2 --tensor-parallel 3", ["--hidden-size 128", "--tensor-parallel 3"]),
        ("gpt2 --tensor-parallel 2 --tp-comm-overlap", ["--tp-comm-overlap", "--sequence-parallel"]),
        ("gpt2 --pipeline-parallel 2", ["--pipeline-parallel 2"]),
        ("gpt2 --sequence-length 300", ["--sequence-length 300", "--max-sequence-length 256"]),
        ("gpt2 --lora-rank 4 --lora-target-modules nothing", ["--lora-target-modules nothing"]),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], arguments: str, named: list[str]) -> None:
    assert main(["explain", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(part in err for part in named), err


def test_help_names_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    assert "gpt2|llama3|qwen3|mixtral" in capsys.readouterr().out


def test_training_on_one_rank_has_no_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    flags = "--num-layers 1 --hidden-size 32 --sequence-length 16 --batch-size 1 --num-iteration 1 --tp-comm-strict"
    assert main(["train", "gpt2", *flags.split(), "--data", "corpus.txt", "--run-dir", "run"]) == 0
    out = capsys.readouterr().out
    assert "step 1/1" in out
    assert "attention.qkv" not in out
