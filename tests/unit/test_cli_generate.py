"""`shiplap generate` in this process: what it prints, what it takes for a prompt and an end, and what it refuses."""

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from shiplap import ModelParallelConfig
from shiplap.checkpoint import save_huggingface
from shiplap.commands.main import main
from shiplap.config import TransformerConfig
from shiplap.models.decoder import build_model

Command = Callable[[str], tuple[int, str, str]]
SPEED = r"prompt: \d+ tokens in \d+\.\d\d s \(\d+\.\d tokens/s\); then \d+ tokens in \d+\.\d\d s \(\d+\.\d tokens/s\)\n"
CONTEXT = 64


def save(folder: Path, *, vocab_size: int = 257, end_of_text: int | None = 256, seed: int = 4) -> None:
    """A random GPT-2, as `shiplap train --save` leaves it."""
    config = TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=64,
        max_sequence_length=CONTEXT,
        initializer_range=0.2,
    )
    model = build_model("gpt2", config, parallel=ModelParallelConfig(), group=None, seed=seed)
    save_huggingface(model, str(folder), family="gpt2", config=config, group=None, end_of_text=end_of_text)


def save_tokenizer(path: Path, *, begin: bool = False) -> None:
    """Every byte is a token; two special ones, of which the first may stand before every text."""
    alphabet = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    if begin:
        special = [("<|begin_of_text|>", 256)]
        backend.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=special)
    backend.save(str(path))


def change(path: Path, **values: object) -> None:
    """Set fields of a JSON file, made if it is not there."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad models, as the tests name them."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "model")
    save(folder / "numbers", vocab_size=300)
    (folder / "empty").mkdir()
    for name in ("weightless", "endless", "broken", "headless"):
        save(folder / name)
    for path in (folder / "weightless").glob("*.safetensors"):
        path.unlink()
    change(folder / "endless/generation_config.json", eos_token_id="end")
    (folder / "broken/generation_config.json").write_text("{")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "headless/tokenizer.json"))
    return folder


@pytest.fixture
def generate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models_folder: Path
) -> Iterator[Command]:
    """Runs `shiplap generate` in a folder of its own with those models: its exit code, output and errors."""
    shutil.copytree(models_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are so small that threads would only wait for each other

    def run(arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["generate", *shlex.split(arguments)])
        except SystemExit as stopped:  # tyro's way out
            code = int(str(stopped.code))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    yield run
    torch.set_num_threads(num_threads)


def test_it_prints_prompt_and_continuation_and_nothing_else(generate: Command) -> None:
    code, out, err = generate("model --prompt 'Once upon' --num-tokens 20 --no-stop")
    assert code == 0
    assert out.startswith("Once upon")
    assert out.endswith("\n")
    assert len(out) > len("Once upon\n")
    assert re.fullmatch(SPEED, err)
    assert generate("model --prompt 'Once upon' --num-tokens 20 --no-stop")[1] == out
    assert generate("model --prompt 'Once upon' --num-tokens 20 --no-stop --seed 3")[1] != out


def test_temperature_0_needs_no_seed(generate: Command) -> None:
    flags = "model --prompt Once --temperature 0 --num-tokens 20 --no-stop"
    assert generate(f"{flags} --seed 1")[1] == generate(f"{flags} --seed 2")[1]


def test_several_samples_are_told_apart(generate: Command) -> None:
    flags = "--prompt Once --num-tokens 15 --no-stop"
    code, out, _ = generate(f"model {flags} --num-samples 3 --seed 5")
    alone = [generate(f"model {flags} --seed {seed}")[1] for seed in (5, 6, 7)]
    assert code == 0
    assert out == "".join(f"--- sample {i + 1}/3 ---\n{text}" for i, text in enumerate(alone))


def test_a_full_context_is_told_once(generate: Command) -> None:
    code, _, err = generate(f"model --prompt Once --num-tokens {3 * CONTEXT} --no-stop")
    assert code == 0
    assert err.count("later half") == 1
    assert f"{CONTEXT} tokens" in err
    assert "later half" not in generate(f"model --prompt Once --num-tokens {CONTEXT - 4} --no-stop")[2]


@pytest.mark.parametrize("where", ["file", "-"])
def test_a_prompt_from_elsewhere_is_taken_as_it_stands(
    generate: Command, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    text = "Öl,\n  und --prompt\n"
    Path("file").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, err = generate(f"model --prompt-file {where} --num-tokens 5 --no-stop")
    assert code == 0
    assert out.startswith(text)
    assert f"prompt: {len(text.encode())} tokens" in err


def test_an_empty_prompt_begins_after_an_end_of_text(generate: Command) -> None:
    code, out, err = generate("model --prompt '' --num-tokens 20 --no-stop")
    assert code == 0
    assert out != "\n"
    assert "prompt: 1 tokens" in err


def test_the_end_of_text_is_what_the_models_files_say(generate: Command) -> None:
    flags = "model --prompt Once --num-tokens 40 --temperature 0"
    whole = generate(f"{flags} --no-stop")[1]

    def ends(text: str) -> int:
        """Of the new text; random bytes that are not text count one each."""
        return len(text.removeprefix("Once").removesuffix("\n"))

    change(Path("model/config.json"), eos_token_id=None)
    assert generate(flags)[1] == whole  # the byte tokenizer's own end of text does not come
    tokens = [ord(c) for c in whole.removeprefix("Once") if ord(c) < 128]
    first, second = dict.fromkeys(tokens[2:]).keys() - set(tokens[:2]), tokens[:1]
    assert first
    stop = next(token for token in tokens if token in first)
    change(Path("model/config.json"), eos_token_id=stop)
    early = generate(flags)[1]
    assert whole.startswith(early.removesuffix("\n"))
    assert ends(early) < ends(whole)
    # What generation_config.json says comes first, and may be several.
    change(Path("model/generation_config.json"), eos_token_id=[second[0], stop])
    assert ends(generate(flags)[1]) < ends(early)
    assert generate(f"{flags} --no-stop")[1] == whole


def test_the_newest_checkpoint_of_a_run_is_taken_and_named(generate: Command) -> None:
    save(Path("run/step-9"), seed=1)
    save(Path("run/step-10"), seed=2)
    flags = "--prompt Once --num-tokens 20 --no-stop"
    code, out, err = generate(f"run {flags}")
    assert code == 0
    assert out == generate(f"run/step-10 {flags}")[1]
    assert "run/step-10" in err


def test_what_train_saves_can_be_written_with(generate: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("corpus.txt").write_text("ab" * 1000)
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --sequence-length 32"
    steps = "--num-iteration 60 --warmup-iteration 0 --learning-rate 3e-2"
    code = main(["train", "gpt2", *f"{sizes} {steps} --data corpus.txt --save saved --run-dir run".split()])
    assert code == 0, capsys.readouterr().err
    code, out, err = generate("saved --prompt ab --num-tokens 10 --temperature 0")
    assert (code, out) == (0, 6 * "ab" + "\n")
    assert "saved/step-60" in err


def test_the_tokenizer_beside_the_model_reads_the_prompt(generate: Command) -> None:
    """With the special tokens that it puts before a text."""
    save(Path("other"), vocab_size=300)
    save_tokenizer(Path("other/tokenizer.json"), begin=True)
    code, out, err = generate("other --prompt Once --num-tokens 10 --no-stop")
    assert code == 0
    assert out.startswith("Once")
    assert "prompt: 5 tokens" in err
    # And one that is named instead.
    save_tokenizer(Path("plain.json"))
    assert "prompt: 4 tokens" in generate("other --prompt Once --num-tokens 10 --no-stop --tokenizer plain.json")[2]


def test_bfloat16_writes(generate: Command) -> None:
    code, out, _ = generate("model --prompt Once --num-tokens 10 --no-stop --dtype bfloat16")
    assert code == 0
    assert out.startswith("Once")
    assert torch.get_default_dtype() == torch.float32


def test_help_has_every_group(generate: Command) -> None:
    code, out, _ = generate("--help")
    assert code == 0
    assert "shiplap generate DIR" in out
    for group in ("text", "sampling", "machine"):
        assert f"{group} options" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["model's folder", "shiplap generate DIR"]),
        ("--prompt Once model", ["model's folder first"]),
        ("nowhere --prompt Once", ["nowhere"]),
        ("model", ["--prompt TEXT", "--prompt-file", "none is given"]),
        ("model --prompt a --prompt-file file", ["both are given"]),
        ("model --prompt-file nowhere", ["--prompt-file nowhere", "No such file"]),
        ("model --prompt-file .", ["--prompt-file .", "directory"]),
        ("model --prompt-file latin.txt", ["--prompt-file latin.txt", "UTF-8", "0xfc"]),
        ("model --prompt 'a\udcfc'", ["--prompt is not UTF-8"]),
        (f"model --prompt {'a' * 65}", ["65 tokens", "64"]),
        ("model --prompt a --num-tokens 0", ["--num-tokens", "at least 1", "got 0"]),
        ("model --prompt a --num-samples 0", ["--num-samples", "at least 1", "got 0"]),
        ("model --prompt a --temperature -1", ["--temperature", "at least 0", "got -1"]),
        ("model --prompt a --top-k -1", ["--top-k", "at least 0", "got -1"]),
        ("model --prompt a --top-p 0", ["--top-p", "(0, 1]", "got 0"]),
        ("model --prompt a --top-p 1.1", ["--top-p", "(0, 1]", "got 1.1"]),
        ("model --prompt a --seed -1", ["--seed", "at least 0", "got -1"]),
        ("model --prompt a --tensor-parallel 0", ["--tensor-parallel", "at least 1", "got 0"]),
        ("model --prompt a --tensor-parallel 3", ["32", "--tensor-parallel 3"]),
        ("model --prompt a --dtype float16", ["--dtype", "float16", "bfloat16"]),
        ("model --prompt a --sequence-parallel", ["--sequence-parallel"]),
        ("model --prompt a --tokenizer nowhere.json", ["--tokenizer", "nowhere.json"]),
        ("model --prompt a --tokenizer large.json", ["--tokenizer large.json", "258 tokens", "257"]),
        ("numbers --prompt a", ["numbers/tokenizer.json", "300 tokens", "257", "--tokenizer"]),
        ("empty --prompt a", ["empty/config.json"]),
        ("weightless --prompt a", ["weightless", "safetensors"]),
        ("weightless --prompt a --tensor-parallel 2", ["weightless", "safetensors"]),
        ("endless --prompt a", ["endless/generation_config.json", "eos_token_id", "'end'"]),
        ("broken --prompt a", ["broken/generation_config.json", "JSON"]),
        ("headless --prompt ''", ["prompt is empty", "--prompt"]),
    ],
)
def test_bad_input_is_named_and_ends_with_code_2(generate: Command, *, arguments: str, named: list[str]) -> None:
    Path("latin.txt").write_bytes("für".encode("latin1"))
    save_tokenizer(Path("large.json"))
    code, out, err = generate(arguments)
    assert (code, out) == (2, "")
    for part in named:
        assert part in err, err
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
@pytest.mark.parametrize(("num_ranks", "named"), [(1, "no CUDA device"), (2, "0 CUDA devices")])
def test_absent_cuda_is_named(generate: Command, num_ranks: int, named: str) -> None:
    code, _, err = generate(f"model --prompt a --device cuda --tensor-parallel {num_ranks}")
    assert code == 2
    assert "--device cuda" in err
    assert named in err
