"""Hugging Face directories on one rank: other people's layouts, damaged files, and what is written."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shiplap.checkpoint import check_huggingface, load_huggingface, save_huggingface, write_huggingface
from shiplap.commands.main import main
from shiplap.config import ModelParallelConfig, TransformerConfig, UserError
from shiplap.families.config_json import read_config
from shiplap.models.decoder import build_model

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "max_sequence_length": 32,
}
CONFIGS = {
    "gpt2": TransformerConfig(**SIZES),
    "llama3": TransformerConfig(**SIZES, num_key_value_heads=2, tie_embeddings=False),
    "qwen3": TransformerConfig(**SIZES, num_key_value_heads=2),
}


def _write(folder: Path, family: str, **options: Any) -> Path:
    """A directory with random weights."""
    torch.manual_seed(0)
    model = build_model(family, CONFIGS[family], parallel=ModelParallelConfig(), group=None, seed=0)
    save_huggingface(model, str(folder), family=family, config=CONFIGS[family], group=None, **options)
    return folder


def _load(folder: Path) -> dict[str, Tensor]:
    model = load_huggingface(str(folder), parallel=ModelParallelConfig(), group=None).model
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _change(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    # The file is mapped: what is read from it must not change with it.
    tensors = change({name: tensor.clone() for name, tensor in load_file(path).items()})
    path.unlink()
    save_file(tensors, path)


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Without the prefix, and with the causal mask in every block."""
    folder = _write(tmp_path / "model", "gpt2")
    expected = _load(folder)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8) for i in range(2)}
        masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
        return masks | {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}

    _change(folder, change)
    assert _same(_load(folder), expected)


def test_rotary_frequencies_that_older_releases_stored_are_not_read(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "llama3")
    expected = _load(folder)
    _change(folder, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert _same(_load(folder), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = _write(tmp_path / "model", "llama3")
    expected = {name: tensor.to(dtype).float() for name, tensor in _load(folder).items()}
    _change(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert _same(_load(folder), expected)


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "qwen3")
    expected = _load(folder)
    embedding = "model.embed_tokens.weight"
    _change(folder, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})
    assert _same(_load(folder), expected)
    _change(folder, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding"):
        _load(folder)
    _change(folder, lambda tensors: tensors | {"lm_head.weight": tensors[embedding][1:].clone()})
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \[256, 32\], but the model needs \[257, 32\]"):
        _load(folder)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _twice(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "more.safetensors")
    _index(folder, {"a": "model-00001-of-00002.safetensors", "model.norm.weight": "more.safetensors"})


def _changed(**tensors: Tensor | None) -> Callable[[Path], None]:
    """Replaces tensors, or removes them."""

    def change(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        both = stored | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    return lambda folder: _change(folder, change)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, ["model.safetensors is damaged or not a safetensors file", "download complete"]),
        (lambda folder: (folder / "model.safetensors").write_text("hello"), ["model.safetensors is damaged"]),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
            ["model.safetensors is damaged"],
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), ["neither model.safetensors nor", "no weights"]),
        (_pickle, ["pytorch_model.bin", "pickle", "save_pretrained"]),
        (
            lambda folder: _index(folder, {"model.norm.weight": "model-00002-of-00002.safetensors"}),
            ["index.json names model-00002-of-00002.safetensors, which is not there"],
        ),
        (
            lambda folder: _index(folder, {"model.norm.weight": "../x.safetensors"}),
            ["../x.safetensors is not the name"],
        ),
        (lambda folder: _index(folder, {"model.norm.weight": 3}), ["3 is not the name of a safetensors file"]),
        (lambda folder: _index(folder, None), ["index.json: weight_map is missing"]),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            ["holds both model.safetensors and model.safetensors.index.json"],
        ),
        (_twice, ["model.norm.weight", "a second time"]),
        (_changed(model__norm__weight=None), ["tensor model.norm.weight is missing", "shape [32]"]),
        (_changed(model__extra=torch.zeros(1)), ["no place for tensor model.extra"]),
        (_changed(model__norm__weight=torch.zeros(33)), ["model.norm.weight has shape [33]", "needs [32]"]),
        (
            _changed(model__norm__weight=torch.zeros(32, dtype=torch.float64)),
            ["tensor model.norm.weight is stored as F64", "float32, bfloat16 and float16"],
        ),
    ],
)
def test_damaged_directories_are_refused_by_name(
    tmp_path: Path, *, damage: Callable[[Path], None], named: list[str]
) -> None:
    folder = _write(tmp_path / "model", "llama3")
    damage(folder)
    _, config = read_config(str(folder), None)
    for attempt in (lambda: check_huggingface(str(folder), family="llama3", config=config), lambda: _load(folder)):
        with pytest.raises(UserError) as error:
            attempt()
        for part in (str(folder), *named):
            assert part in str(error.value)


def test_nothing_is_written_over_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    (tmp_path / "file").touch()
    for name in ("taken", "file"):
        with pytest.raises(UserError, match=f"{name} is there already"):
            _write(tmp_path / name, "gpt2")
    with pytest.raises(UserError, match="file/model: cannot write there: Not a directory"):
        _write(tmp_path / "file" / "model", "gpt2")
    (tmp_path / "empty").mkdir()
    assert (_write(tmp_path / "empty", "gpt2") / "model.safetensors").exists()

    def interrupted() -> Any:
        yield "embedding.weight", torch.zeros(257, 32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_huggingface(
            str(tmp_path / "half"),
            family="gpt2",
            config=CONFIGS["gpt2"],
            dtype=torch.float32,
            tensors=interrupted(),
        )
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "file", "empty"}


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "gpt2")
    _change(folder, lambda tensors: tensors | {"transformer.ln_f.bias": torch.full((32,), 1e5)})
    model = load_huggingface(str(folder), parallel=ModelParallelConfig(), group=None).model
    options: dict[str, Any] = {"family": "gpt2", "config": CONFIGS["gpt2"], "group": None}
    with pytest.raises(UserError, match=r"final_norm\.bias has values that torch\.float16 cannot hold"):
        save_huggingface(model, str(tmp_path / "saved"), dtype=torch.float16, **options)
    assert not (tmp_path / "saved").exists()


def test_files_are_no_larger_than_asked(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "llama3", max_file_bytes=40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert sorted(files) == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 40_000
    assert sum(sizes) == index["metadata"]["total_size"]
    assert _same(_load(folder), _load(_write(tmp_path / "one", "llama3")))


def test_the_tokenizer_and_its_special_tokens_go_along(tmp_path: Path) -> None:
    source = _write(tmp_path / "source", "llama3", end_of_text=7)
    assert json.loads((source / "config.json").read_text())["eos_token_id"] == 7
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (source / name).write_text(name)
    copy = _write(tmp_path / "copy", "llama3", tokenizer_from=str(source), end_of_text=9)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in copy.iterdir()} == names
    assert json.loads((copy / "config.json").read_text())["eos_token_id"] == 7
    (tmp_path / "words.json").write_text("words")
    other = _write(tmp_path / "other", "llama3", tokenizer_from=str(tmp_path / "words.json"), end_of_text=9)
    assert (other / "tokenizer.json").read_text() == "words"
    assert json.loads((other / "config.json").read_text())["eos_token_id"] == 9


def test_missing_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write(tmp_path / "model", "gpt2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for attempt in (lambda: _load(folder), lambda: _write(tmp_path / "new", "gpt2")):
        with pytest.raises(UserError, match=r"needs safetensors: pip install 'shiplap\[train\]'"):
            attempt()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("llama3 --hf-checkpoint nowhere", ["nowhere: there is no such folder", "downloads nothing"]),
        ("qwen3 --hf-checkpoint llama3", ["config.json: model_type llama is shiplap's llama3", "qwen3 was asked for"]),
        ("llama3 --hf-checkpoint llama3 --preset llama3-1b", ["--preset llama3-1b cannot be had with --hf-checkpoint"]),
        ("llama3 --hf-checkpoint llama3 --hidden-size 64", ["--hidden-size 64 cannot be had with --hf-checkpoint"]),
        ("llama3 --hf-checkpoint llama3 --vocab-size 300", ["--vocab-size 300 cannot be had with --hf-checkpoint"]),
        ("llama3 --hf-checkpoint llama3 --max-sequence-length 33", ["--max-sequence-length 33", "checkpoint's 32"]),
        (
            "gpt2 --hf-checkpoint gpt2 --max-sequence-length 16",
            ["--max-sequence-length 16", "each of its 32 positions"],
        ),
        ("llama3 --hf-checkpoint llama3 --sequence-length 33", ["--sequence-length 33", "--max-sequence-length 32"]),
        ("llama3 --hf-checkpoint llama3 --tensor-parallel 3", ["--hidden-size 32", "--tensor-parallel 3"]),
        ("llama3 --hf-checkpoint damaged", ["damaged/model.safetensors is damaged"]),
        ("llama3 --hf-checkpoint merges", ["--hf-checkpoint merges holds merges.txt but no tokenizer.json"]),
        ("llama3 --hf-checkpoint tokenizer", ["tokenizer/tokenizer.json is not a Hugging Face tokenizer.json"]),
        ("llama3 --save corpus.txt", ["--save corpus.txt is not a folder"]),
        ("llama3 --save corpus.txt/models", ["--save corpus.txt/models: cannot write there: Not a directory"]),
        ("llama3 --save saved --num-iteration 6", ["--save saved: step-6 is there already", "name another folder"]),
        ("llama3 --save saved --save-interval 3 --num-iteration 7", ["--save saved: step-6 is there already"]),
        ("llama3 --save-interval 3", ["--save-interval 3", "--save FOLDER"]),
        ("llama3 --save-interval -1", ["--save-interval must be at least 0"]),
        ("gpt2 --save saved --num-key-value-heads 4", ["GPT-2", "--num-key-value-heads 4"]),
    ],
)
def test_the_command_refuses_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: str,
    named: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, family in (
        ("gpt2", "gpt2"),
        *((name, "llama3") for name in ("llama3", "damaged", "merges", "tokenizer")),
    ):
        _write(tmp_path / folder, family)
    _truncate(tmp_path / "damaged")
    Path("merges/merges.txt").touch()
    Path("tokenizer/tokenizer.json").touch()
    Path("corpus.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    Path("saved/step-6").mkdir(parents=True)
    Path("saved/step-6/config.json").touch()
    started = f"train {arguments} --data corpus.txt" + (
        "" if "--sequence-length" in arguments else " --sequence-length 16"
    )
    assert main(started.split()) == 2
    shown = capsys.readouterr()
    for part in named:
        assert part in shown.err
    assert "step 1/" not in shown.out
    assert "Traceback" not in shown.err
    assert [path.name for path in Path("saved").rglob("*")] == ["step-6", "config.json"]


def test_a_shorter_context_and_another_dropout_may_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write(tmp_path / "model", "llama3")
    (tmp_path / "corpus.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    arguments = (
        f"train llama3 --hf-checkpoint {folder} --max-sequence-length 16 --sequence-length 16 --dropout 0.1 "
        f"--data {tmp_path}/corpus.txt --num-iteration 2 --batch-size 2 --run-dir {tmp_path}/run "
        f"--save {tmp_path}/saved"
    )
    assert main(arguments.split()) == 0
    shown = capsys.readouterr()
    assert f"parameters, from {folder}, float32 in 1 file\n" in shown.out
    assert f"step 2/2 | saved {tmp_path}/saved/step-2\n" in shown.out
    _, config = read_config(f"{tmp_path}/saved/step-2", "llama3")
    assert config.max_sequence_length == 16
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["transformer"]["dropout"] == 0.1


def test_a_model_without_tokenizer_must_be_said_to_read_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --vocab-size 300"
    short = "--sequence-length 16 --batch-size 2 --warmup-iteration 0 --num-iteration 1"
    assert main(["train", "llama3", *f"{sizes} --num-key-value-heads 2 {short} --save saved".split()]) == 0
    tune = ["train", "llama3", "--hf-checkpoint", "saved/step-1", *short.split()]
    write = ["generate", "saved", "--prompt", "ab", "--num-tokens", "3"]
    for command in (tune, write):
        capsys.readouterr()
        assert main(command) == 2
        assert "--tokenizer bytes" in capsys.readouterr().err
        assert main([*command, "--tokenizer", "bytes"]) == 0
    assert main([*tune, *["--tokenizer", "bytes", "--save", "again"]]) == 0
    assert sorted(path.name for path in Path("again/step-1").iterdir()) == ["config.json", "model.safetensors"]
