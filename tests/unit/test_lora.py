"""Adapters: what names mean, what is refused, and a run of `shiplap train` with them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shiplap.checkpoint import read_adapters
from shiplap.commands.main import main
from shiplap.config import TransformerConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.families import preset
from shiplap.lora import Adapters, find_targets
from shiplap.lora.targets import module_names

LLAMA = preset("llama3", "llama3-debug")
GPT2 = preset("gpt2", "gpt2-debug")
MIXTRAL = preset("mixtral", "mixtral-debug")


def modules(family: str, config: TransformerConfig, *names: str) -> set[str]:
    """The modules that names mean, without their layer's number."""
    targets = find_targets(family, config, names)
    paths = [part.module for target in targets for part in target.parts]
    assert len(paths) % config.num_layers == 0
    return {".".join(word for word in path.split(".") if not word.isdigit()) for path in paths}


@pytest.mark.parametrize(
    ("family", "config", "names", "found"),
    [
        ("llama3", LLAMA, ["q_proj"], ["self_attn.q_proj"]),
        ("llama3", LLAMA, ["self_attn.q_proj", "v_proj"], ["self_attn.q_proj", "self_attn.v_proj"]),
        ("llama3", LLAMA, ["qkv"], ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("llama3", LLAMA, ["attention.proj", "fc2"], ["self_attn.o_proj", "mlp.down_proj"]),
        ("llama3", LLAMA, ["fc1"], ["mlp.gate_proj", "mlp.up_proj"]),
        ("mixtral", MIXTRAL, ["all-linear"], [f"self_attn.{x}_proj" for x in "qkvo"]),
    ],
)
def test_names_mean_parts_of_layers(family: str, config: TransformerConfig, names: list[str], found: list[str]) -> None:
    assert modules(family, config, *names) == {f"model.layers.{name}" for name in found}


def test_names_of_gpt2_mean_what_they_mean_in_peft() -> None:
    assert modules("gpt2", GPT2, "c_proj") == {"transformer.h.attn.c_proj", "transformer.h.mlp.c_proj"}
    assert modules("gpt2", GPT2, "qkv") == modules("gpt2", GPT2, "c_attn") == {"transformer.h.attn.c_attn"}


def test_one_layer_can_be_named() -> None:
    [target] = find_targets("llama3", LLAMA, ["layers.2.self_attn.k_proj"])
    assert target.layer == "blocks.2.attention.qkv"
    assert [part.module for part in target.parts] == ["model.layers.2.self_attn.k_proj"]
    assert [*target.parts[0].rows][::63] == [128, 191], "keys stand below the 128 rows of the queries"


@pytest.mark.parametrize(
    ("family", "config", "names", "short"),
    [
        ("llama3", LLAMA, ["q_proj", "fc1"], ["gate_proj", "q_proj", "up_proj"]),
        ("gpt2", GPT2, ["mlp.c_proj"], ["mlp.c_proj"]),
        ("gpt2", GPT2, ["c_proj"], ["c_proj"]),
        ("gpt2", GPT2, ["h.1.attn.c_attn"], ["1.attn.c_attn"]),
    ],
)
def test_short_names_mean_the_same_modules_and_no_others(
    family: str, config: TransformerConfig, names: list[str], short: list[str]
) -> None:
    targets = find_targets(family, config, names)
    assert module_names(family, config, targets) == short
    assert find_targets(family, config, short) == targets


@pytest.mark.parametrize(
    ("family", "config", "name", "says"),
    [
        (
            "llama3",
            LLAMA,
            "c_attn",
            ["--lora-target-modules c_attn", "attention.qkv (self_attn.q_proj, self_attn.k_proj", "all-linear"],
        ),
        ("llama3", LLAMA, "proj_q", ["proj_q matches nothing"]),
        ("gpt2", GPT2, "q_proj", ["attention.qkv (attn.c_attn)"]),
        ("mixtral", MIXTRAL, "fc1", ["fc1 matches nothing", "Experts cannot be adapted"]),
        ("mixtral", MIXTRAL, "w1", ["Experts cannot be adapted"]),
    ],
)
def test_a_name_that_means_nothing_lists_what_there_is(
    family: str, config: TransformerConfig, name: str, says: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        find_targets(family, config, ["all-linear", name])
    for text in says:
        assert text in str(error.value)


def test_a_rank_above_the_layers_size_is_refused_with_both_numbers() -> None:
    targets = tuple(find_targets("llama3", LLAMA, ["k_proj"]))
    Adapters(targets=targets, rank=64, alpha=1.0)
    with pytest.raises(UserError, match=r"--lora-rank 65 is larger than blocks\.0\.attention\.qkv.* is 64"):
        Adapters(targets=targets, rank=65, alpha=1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_rank": 0}, "--lora-rank must be at least 1, got 0"),
        ({"lora_rank": -3}, "--lora-rank must be at least 1, got -3"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "--lora-alpha must be above 0"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, r"--lora-dropout must be in \[0, 1\)"),
        ({"lora_rank": 4, "lora_target_modules": ()}, "--lora-target-modules names nothing"),
        ({"lora_save_path": "x"}, "--lora-save-path x, but there are no adapters"),
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0, but there are no adapters"),
        ({"lora_load_path": "x", "lora_target_modules": ("qkv",)}, "Drop one of the two"),
    ],
)
def test_options_that_make_no_adapters_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        LoraOptions(**options)


def write_adapters(folder: Path, *, config: dict[str, object] | None = None, **tensors: torch.Tensor) -> str:
    """Adapters of rank 2 for the first layer's queries, or with these changes."""
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    named = {f"{module}.lora_A.weight": torch.ones(2, 128), f"{module}.lora_B.weight": torch.ones(128, 2)}
    for name, tensor in tensors.items():
        named[name if "." in name else f"{module}.{name}.weight"] = tensor
    save_file(named, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | (config or {})))
    return str(folder)


def test_adapters_on_disk_are_described(tmp_path: Path) -> None:
    found = read_adapters(write_adapters(tmp_path / "a"), family="llama3", config=LLAMA)
    assert (found.rank, found.alpha, found.dropout) == (2, 4.0, 0.0)
    assert [target.layer for target in found.targets] == ["blocks.0.attention.qkv"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"peft_type": "IA3"}}, ["adapter_config.json: peft_type", "IA3", "LORA"]),
        ({"config": {"use_dora": True}}, ["use_dora"]),
        ({"config": {"use_rslora": True}}, ["use_rslora"]),
        ({"config": {"bias": "all"}}, ["bias", "none"]),
        ({"config": {"modules_to_save": ["lm_head"]}}, ["modules_to_save"]),
        ({"config": {"rank_pattern": {"q_proj": 4}}}, ["rank_pattern"]),
        ({"config": {"init_lora_weights": "pissa"}}, ["init_lora_weights", "pissa"]),
        ({"config": {"r": "two"}}, ["r must be a whole number"]),
        ({"config": {"r": 3}}, ["lora_A.weight", "[2, 128]", "[3, 128]"]),
        ({"lora_A": torch.ones(2, 64)}, ["lora_A.weight", "[2, 64]", "[2, 128]"]),
        ({"lora_B": torch.ones(2, 128)}, ["lora_B.weight", "[2, 128]", "[128, 2]"]),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 128)}, ["lm_head", "attention.qkv"]),
        ({"base_model.model.model.norm.weight": torch.ones(128)}, ["not a factor"]),
        (
            {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(2, 128)},
            ["model.layers.9.self_attn.q_proj"],
        ),
        (
            {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": torch.ones(2, 128)},
            ["model.layers.1.self_attn.q_proj.lora_B.weight is missing"],
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: list[str]) -> None:
    folder = write_adapters(tmp_path / "a", **changes)
    with pytest.raises(UserError) as error:
        read_adapters(folder, family="llama3", config=LLAMA)
    for text in says:
        assert text in str(error.value)


def test_damaged_missing_and_pickled_adapters_are_refused(tmp_path: Path) -> None:
    def message(folder: str) -> str:
        with pytest.raises(UserError) as error:
            read_adapters(folder, family="llama3", config=LLAMA)
        return str(error.value)

    assert "adapter_config.json: cannot read it" in message(str(tmp_path / "nothing"))
    folder = tmp_path / "a"
    write_adapters(folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "adapter_model.safetensors is damaged" in message(str(folder))
    weights.rename(folder / "adapter_model.bin")
    assert "pickle" in message(str(folder))
    (folder / "adapter_model.bin").unlink()
    assert "holds no adapter_model.safetensors" in message(str(folder))


SIZES = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --sequence-length 16"
SHORT = "--batch-size 2 --warmup-iteration 1"


def test_a_run_trains_the_adapters_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"train llama3 {SIZES} --num-key-value-heads 2 {SHORT} --num-iteration 2 --save base".split()) == 0
    tune = f"train llama3 --hf-checkpoint base/step-2 {SHORT} --sequence-length 16"
    new = f"{tune} --lora-rank 4 --lora-target-modules q_proj fc2 --num-iteration 4 --learning-rate 0.1"
    assert main(f"{new} --save-interval 2 --lora-save-path adapter --save merged".split()) == 0
    assert "LoRA: rank 4, alpha 16, 640 of them are trained, new" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "adapter-step-2", "base", "merged", "runs"]

    base = load_file("base/step-2/model.safetensors")
    trained = load_file("merged/step-4/model.safetensors")
    factors = load_file("adapter/adapter_model.safetensors")
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        delta = torch.zeros(())
        if f"{key}.lora_A.weight" in factors:
            delta = 4.0 * factors.pop(f"{key}.lora_B.weight") @ factors.pop(f"{key}.lora_A.weight")
            assert delta.abs().max() > 0
        torch.testing.assert_close(trained[name], weight + delta)
    assert not factors

    # Going on begins where the adapters stood, and leaves what does not go together alone.
    again = f"{tune} --lora-load-path adapter --num-iteration 1 --learning-rate 0"
    assert main(f"{again} --save again".split()) == 0
    assert all(torch.equal(trained[n], w) for n, w in load_file("again/step-1/model.safetensors").items())
    capsys.readouterr()
    for flags, says in (
        ("--lora-rank 8", "--lora-rank is 8, but the adapters in --lora-load-path adapter have 4"),
        ("--lora-alpha 3", "--lora-alpha is 3.0, but the adapters"),
        ("--lora-save-path adapter", "--lora-save-path adapter: adapter is there already"),
    ):
        assert main(f"{again} {flags}".split()) == 2
        assert says in capsys.readouterr().err


def test_converting_merges_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"train gpt2 {SIZES} {SHORT} --num-iteration 1 --save base".split()) == 0
    tune = f"train gpt2 --hf-checkpoint base/step-1 {SHORT} --sequence-length 16 --num-iteration 3 --learning-rate 0.1"
    assert main(f"{tune} --lora-rank 2 --lora-save-path adapter --save merged".split()) == 0
    assert main(["convert", "base/step-1", "converted", "--lora", "adapter"]) == 0
    converted, merged = (load_file(f"{name}/model.safetensors") for name in ("converted", "merged/step-3"))
    assert converted.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(converted[name], weight)
    assert main(["convert", "base/step-1", "other", "--lora", "nowhere"]) == 2
    assert not Path("other").exists()


def test_generating_with_adapters_is_generating_with_the_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "gpt2", *f"{SIZES} {SHORT} --num-iteration 1 --save base".split()]) == 0
    tune = f"--hf-checkpoint base/step-1 {SHORT} --sequence-length 16 --num-iteration 3 --learning-rate 0.5"
    assert main(["train", "gpt2", *f"{tune} --lora-rank 2 --lora-save-path adapter --save merged".split()]) == 0

    def written(arguments: str) -> str:
        capsys.readouterr()
        assert main(["generate", *f"{arguments} --prompt ab --num-tokens 20 --temperature 0".split()]) == 0
        return capsys.readouterr().out

    assert written("base --lora adapter") == written("merged") != written("base")
    assert main(["generate", *["base", "--prompt", "ab", "--lora", "nowhere"]]) == 2
    assert "nowhere/adapter_config.json" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--save out", "--lora-rank 2 --lora-save-path out"])
def test_a_run_that_could_not_save_at_its_end_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    assert main(["train", "gpt2", *f"{SIZES} {SHORT} --num-iteration 1 {flags}".split()]) == 2
    assert f"writing {flags.removeprefix('--lora-rank 2 ')} needs safetensors" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
