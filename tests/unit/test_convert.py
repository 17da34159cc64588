"""`shiplap convert`: what it writes, that `transformers` reads it, and what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shiplap.checkpoint import open_stored_model, write_huggingface
from shiplap.commands.main import main
from tests.cases import llmc, published

Convert = Callable[[str], tuple[int, str, str]]
FAMILIES = ("gpt2", "llama3", "qwen3", "mixtral")


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Convert:
    """Runs `shiplap convert` in this process and an empty folder: its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["convert", *arguments.split()])
        except SystemExit as stopped:  # tyro's way out
            code = int(str(stopped.code))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a model into the folder as `transformers` does, with such ends of text as published models name."""
    model = published.model(family, dtype)
    model.config.bos_token_id, model.config.eos_token_id = 3, [4, 5]
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = published.load(folder)(published.tokens()).logits
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama3", torch.bfloat16), ("qwen3", torch.float16)],
)
def test_round_trip_keeps_every_bit(convert: Convert, tmp_path: Path, *, family: str, dtype: torch.dtype) -> None:
    save(family, tmp_path / "model", dtype)
    code, out, err = convert("model new")
    assert (code, err) == (0, "")
    assert f"model: {family}, " in out
    assert out.endswith("written: new\n")
    assert same(tensors(tmp_path / "model"), tensors(tmp_path / "new"))
    assert torch.equal(logits(tmp_path / "model"), logits(tmp_path / "new"))
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, [4, 5])
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    # And once more: the result is a source like any other.
    assert convert("new again")[0] == 0
    assert same(tensors(tmp_path / "new"), tensors(tmp_path / "again"))
    assert (tmp_path / "new" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_changed_once(convert: Convert, tmp_path: Path, dtype: torch.dtype) -> None:
    save("llama3", tmp_path / "model")
    name = str(dtype).removeprefix("torch.")
    assert convert(f"model new --dtype {name}")[0] == 0
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "new")
    assert same({name: tensor.to(dtype) for name, tensor in before.items()}, after)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == name


def test_kept_dtypes_may_differ(convert: Convert, tmp_path: Path) -> None:
    save("mixtral", tmp_path / "model", torch.bfloat16)
    mixed = {
        name: x.float() if "block_sparse_moe.gate" in name else x for name, x in tensors(tmp_path / "model").items()
    }
    save_file(mixed, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert convert("model new")[0] == 0
    assert same(tensors(tmp_path / "new"), mixed)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_files_are_as_small_as_asked(convert: Convert, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "model")
    assert convert("model new --max-file-gb 4e-5")[0] == 0
    sizes = [sum(x.nbytes for x in load_file(path).values()) for path in (tmp_path / "new").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 40_000
    assert torch.equal(logits(tmp_path / "model"), logits(tmp_path / "new"))
    assert convert("new again")[0] == 0
    assert same(tensors(tmp_path / "model"), load_file(tmp_path / "again" / "model.safetensors"))


def test_the_newest_checkpoint_is_taken(convert: Convert, tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save("gpt2", tmp_path / "run" / f"step-{step}", torch.float32 if step == 10 else torch.bfloat16)
    code, out, _ = convert("run new")
    assert code == 0
    assert out.startswith("run/step-10: gpt2, ")
    assert same(tensors(tmp_path / "run" / "step-10"), tensors(tmp_path / "new"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "write"),
    [("gpt2", llmc.write_gpt2), ("llama3", llmc.write_llama3), ("llama3", llmc.write_llama3_branch)],
)
def test_a_file_of_llmc_becomes_what_it_was_made_from(
    convert: Convert,
    tmp_path: Path,
    *,
    family: str,
    write: Callable[[Path, dict[str, Tensor], torch.dtype], None],
    dtype: torch.dtype,
) -> None:
    model = published.model(family, dtype)
    write(tmp_path / "model.bin", model.state_dict(), dtype)
    code, out, err = convert("model.bin new")
    assert (code, err) == (0, "")
    assert "model.bin has no tokenizer beside it: put tokenizer.json and tokenizer_config.json into new" in out
    model.to(dtype).save_pretrained(tmp_path / "model")
    assert same(tensors(tmp_path / "model"), tensors(tmp_path / "new"))
    assert torch.equal(logits(tmp_path / "model"), logits(tmp_path / "new"))


def test_parameters_can_be_changed_on_their_way(tmp_path: Path) -> None:
    save("llama3", tmp_path / "model")
    model = open_stored_model(str(tmp_path / "model"))
    doubled = ((name, 2 * whole if "qkv" in name else whole) for name, whole in model.parameters())
    write_huggingface(str(tmp_path / "new"), family=model.family, config=model.config, dtype=None, tensors=doubled)
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "new")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if any(f"{x}_proj" in name for x in "qkv")}
    assert all(torch.equal(2 * before[name], after[name]) for name in changed)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, with some that something is wrong with, and with things that are no model."""
    folder = tmp_path_factory.mktemp("sources")
    save("llama3", folder / "model")
    (folder / "empty").mkdir()
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    (folder / "text").write_text("words")
    whole = tensors(folder / "model")
    norm = whole.pop("model.norm.weight")
    norms: dict[str, dict[str, Tensor]] = {
        "missing": {},
        "extra": {"model.norm.weight": norm, "extra.weight": norm.clone()},
        "shape": {"model.norm.weight": norm[:63].clone()},
        "huge": {"model.norm.weight": norm * 1e6},
    }
    for name, those in norms.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
        save_file(whole | those, folder / name / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["needs the model and a new folder", "shiplap convert checkpoints model"]),
        ("model", ["needs the model and a new folder"]),
        ("--dtype bfloat16 model new", ["needs the model and a new folder first"]),
        ("model new --dtype int8", ["--dtype", "int8", "bfloat16"]),
        ("model new --max-file-gb 0", ["--max-file-gb must be above 0, got 0"]),
        ("nowhere new", ["nowhere: cannot read it: No such file"]),
        ("empty new", ["empty: neither a Hugging Face directory", "config.json", "step-N", "llm.c model file"]),
        ("text new", ["text: truncated: 5 bytes, where the header alone takes 1024"]),
        ("model taken", ["taken is there already"]),
        ("model model", ["model is there already"]),
        ("model text", ["text is there already"]),
        ("model text/new", ["text/new: cannot write there: Not a directory"]),
        ("missing new", ["missing: tensor model.norm.weight is missing", "[64]"]),
        ("extra new", ["extra: the model has no place for tensor extra.weight"]),
        ("shape new", ["shape: tensor model.norm.weight has shape [63], but the model needs [64]"]),
        ("huge new --dtype float16", ["has values that torch.float16 cannot hold"]),
    ],
)
def test_a_refusal_is_named_and_leaves_nothing(
    convert: Convert, monkeypatch: pytest.MonkeyPatch, sources: Path, *, arguments: str, named: list[str]
) -> None:
    monkeypatch.chdir(sources)
    before = sorted(sources.rglob("*"))
    code, out, err = convert(arguments)
    assert code == 2
    for part in named:
        assert part in err, err
    assert "Traceback" not in out + err
    assert sorted(sources.rglob("*")) == before


def test_a_tied_head_that_is_another_one_is_refused(convert: Convert, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "model")
    whole = tensors(tmp_path / "model")
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
    save_file(whole, tmp_path / "model" / "model.safetensors")
    assert convert("model new")[0] == 0
    assert "lm_head.weight" not in tensors(tmp_path / "new")
    whole["lm_head.weight"][-1, -1] += 1
    save_file(whole, tmp_path / "model" / "model.safetensors")
    code, _, err = convert("model other")
    assert code == 2
    assert "lm_head.weight differs from the embedding" in err


def test_an_interruption_leaves_nothing(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path / "model")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shiplap.checkpoint.huggingface_writer._WeightFiles.finish", interrupt)
    assert convert("model new")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_terminal_sees_how_far_it_is(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path / "model")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = convert("model one")
    assert code == 0
    assert "100%" in err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    code, _, err = convert("model two")
    assert code == 0
    assert "There is no progress bar" in err
    assert "pip install 'shiplap[train]'" in err


def test_help(convert: Convert) -> None:
    code, out, _ = convert("--help")
    assert code == 0
    for part in ("SOURCE", "DESTINATION", "--dtype", "--max-file-gb"):
        assert part in out
