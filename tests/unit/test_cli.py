"""The command line in this process: help, what bad input gets, and what a run writes."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import shiplap
from shiplap.commands.main import main
from shiplap.config import TrainConfig
from shiplap.data import write_token_file
from shiplap.train.folders import claim_run_folder

Command = Callable[[str], tuple[int, str, str]]

MODEL = (
    "train gpt2 --num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --max-sequence-length 32 "
    "--sequence-length 16 --batch-size 2 --num-iteration 3"
)
SMALL = f"{MODEL} --data corpus.txt"
STEP_LINE = r"step 3/3 \| train loss \d\.\d{4} \| lr \d\.\d\de-\d\d \| \d+\.\d ms \| \d+ tok/s"


@pytest.fixture
def shiplap_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs `shiplap` in this process and an empty folder: its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)

    def run(arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(arguments.split())
        except SystemExit as stopped:  # tyro's way out
            code = int(str(stopped.code))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_help_lists_the_verbs(shiplap_command: Command) -> None:
    code, out, _ = shiplap_command("--help")
    assert code == 0
    assert "train" in out


def test_no_verb_shows_the_help_as_a_mistake(shiplap_command: Command) -> None:
    code, out, err = shiplap_command("")
    assert (code, out) == (2, "")
    assert "usage: shiplap" in err


def test_version(shiplap_command: Command) -> None:
    assert shiplap_command("--version") == (0, f"shiplap {shiplap.__version__}\n", "")


def test_help_of_train_names_the_models(shiplap_command: Command) -> None:
    code, out, _ = shiplap_command("train --help")
    assert code == 0
    assert "gpt2" in out


def test_help_has_a_group_for_each_dataclass_and_every_flag(shiplap_command: Command) -> None:
    code, out, _ = shiplap_command("train gpt2 --help")
    assert code == 0
    for group in dataclasses.fields(TrainConfig):
        assert f"{group.name} options" in out
        for field in dataclasses.fields(group.type):  # type: ignore[arg-type]
            flag = "--" + str(field.metadata.get("flag", field.name)).replace("_", "-")
            assert re.search(rf"{flag}\b", out), flag


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("trian", ["trian", "did you mean train"]),
        ("xyz", ["xyz", "there is train"]),
        ("train", ["name of a model", "gpt2"]),
        ("train gpt3", ["gpt3", "did you mean gpt2"]),
        ("train gpt2 --tensor-paralel 2", ["--tensor-paralel", "Perhaps you meant", "--tensor-parallel"]),
        ("train gpt2 --device tpu", ["--device", "tpu", "cpu"]),
        ("train gpt2 --batch-size two", ["--batch-size", "two"]),
        ("train gpt2 --sequence-parallel", ["--sequence-parallel", "--tensor-parallel > 1, got 1"]),
        ("train gpt2 --tensor-parallel 2 --tp_comm_overlap", ["--tp-comm-overlap", "--sequence-parallel"]),
        ("train gpt2 --tensor-parallel 3", ["--hidden-size 128", "--tensor-parallel 3"]),
        (
            "train gpt2 --tensor-parallel 2 --ffn-hidden-size 511",
            ["--ffn-hidden-size 511", "--tensor-parallel 2"],
        ),
        ("train gpt2 --hidden-size 130", ["--hidden-size 130", "--num-attention-heads 8"]),
        ("train gpt2 --tensor-parallel 2 --nproc 3", ["3 ranks", "2 × 1 = 2", "--nproc"]),
        ("train gpt2 --tensor-parallel 2 --nproc 1", ["1 rank", "2 × 1 = 2", "--nproc"]),
        ("train gpt2 --nproc 0", ["--nproc", "at least 1", "got 0"]),
        ("train gpt2 --pipeline-parallel 2", ["--pipeline-parallel 2", "not supported by train yet"]),
        (
            "train gpt2 --nproc 2 --batch-size 3 --sequence-length 5 --total-batch-size 45",
            ["--total-batch-size 45", "3 × 5 × 2 = 30"],
        ),
        ("train gpt2 --sequence-length 300", ["--sequence-length 300", "--max-sequence-length 256"]),
        ("train gpt2 --preset gpt2-huge", ["--preset gpt2-huge", "gpt2-124m"]),
        ("train gpt2 --dropout 1", ["--dropout", "got 1"]),
        ("train gpt2 --vocab-size 100", ["vocabulary of 257", "100", "--vocab-size"]),
        ("train gpt2 --data nowhere", ["--data nowhere", "no such file"]),
        ("train gpt2 --data", ["--data"]),
        ("train gpt2 --data empty.txt", ["--data empty.txt", "empty"]),
        ("train gpt2 --data short.txt", ["short.txt", "129", "--sequence-length"]),
        ("train gpt2 --input-bin nowhere.bin", ["--input-bin nowhere.bin", "No such file"]),
        ("train gpt2 --input-bin empty.bin", ["--input-bin empty.bin", "empty"]),
        ("train gpt2 --input-bin truncated.bin", ["truncated.bin", "1000 tokens", "3024 bytes", "2024 bytes"]),
        ("train gpt2 --input-bin magic.bin", ["magic.bin", "magic number is 1", "20240520"]),
        ("train gpt2 --input-bin large.bin", ["large.bin", "token 300", "position 500", "vocabulary of 257"]),
        ("train gpt2 --tokenizer nowhere.json", ["--tokenizer", "nowhere.json"]),
        ("train gpt2 --tokenizer tokenizer.json", ["tokenizer.json", "300 tokens", "is 257", "--vocab-size"]),
        ("train gpt2 --run-dir empty.txt", ["--run-dir empty.txt", "Not a directory"]),
        ("train gpt2 --run-dir empty.txt/run", ["--run-dir empty.txt/run", "Not a directory"]),
        ("train gpt2 --tensor-parallel 2 --run-dir empty.txt/run", ["--run-dir empty.txt/run", "Not a directory"]),
        ("train gpt2 --val-loss-every 1 --validation-fraction 0", ["--validation-fraction 0"]),
    ],
)
def test_bad_input_is_named_and_ends_with_code_2(
    shiplap_command: Command, tmp_path: Path, *, arguments: str, named: list[str]
) -> None:
    _write_bad_files(tmp_path)
    code, out, err = shiplap_command(arguments)
    assert code == 2
    for part in named:
        assert part in err, err
    assert "Traceback" not in out + err
    assert "step 1/" not in out


def _write_bad_files(folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("x" * 100)
    (folder / "empty.bin").touch()
    tokens = np.zeros(1000, dtype=np.int64)
    write_token_file(folder / "truncated.bin", [tokens], vocab_size=257)
    content = (folder / "truncated.bin").read_bytes()
    (folder / "truncated.bin").write_bytes(content[:-1000])
    (folder / "magic.bin").write_bytes((1).to_bytes(4, "little") + content[4:])
    tokens[500] = 300
    write_token_file(folder / "large.bin", [tokens], vocab_size=301)
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(300)}, "unk_token": "w0"}
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer: dict[str, object] = {"version": "1.0", "added_tokens": [], "model": model, **dict.fromkeys(keys)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
@pytest.mark.parametrize(("num_ranks", "named"), [(1, ["no CUDA device"]), (2, ["0 CUDA devices", "2 workers"])])
def test_absent_cuda_is_named(shiplap_command: Command, num_ranks: int, named: list[str]) -> None:
    code, _, err = shiplap_command(f"train gpt2 --device cuda --tensor-parallel {num_ranks}")
    assert code == 2
    for part in ["--device cuda", *named]:
        assert part in err


def test_a_missing_tyro_is_named(shiplap_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    code, _, err = shiplap_command("train gpt2")
    assert code == 2
    assert "pip install 'shiplap[train]'" in err


def test_a_run_shows_and_writes_everything(shiplap_command: Command, tmp_path: Path) -> None:
    flags = "--run-dir run --val-loss-every 2 --sample-every 3 --sample-num-tokens 40"
    code, out, err = shiplap_command(f"{SMALL} {flags}")

    assert (code, err) == (0, "")
    assert "TP 1 × DP 1 × PP 1" in out
    assert re.search(r"gpt2: [\d,]+ parameters", out)
    assert "32 tokens per step" in out
    assert re.search(STEP_LINE, out)
    assert re.findall(r"step (\d)/3 \| val loss \d\.\d{4}", out) == ["2", "3"]
    assert re.search(r"train loss \d\.\d{4} → \d\.\d{4} in 3 steps, median \d+ tok/s\nrun folder: run\n$", out)
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "tensorboard", "loss.png", "samples.txt"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 3]
    steps = [line for line in lines if "train_loss" in line]
    assert all(
        set(line)
        == {
            "step",
            "train_loss",
            "learning_rate",
            "grad_norm",
            "step_ms",
            "tokens_per_s",
            "exposed_tp_comm_ms",
            "exposed_tp_comm_percent",
        }
        for line in steps
    )
    assert [set(line) for line in lines if "val_loss" in line] == [{"step", "val_loss"}] * 2
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    assert (run / "samples.txt").read_text().startswith("--- step 3 ---\n")


def test_without_a_tokenizer_a_sample_is_numbers(shiplap_command: Command, tmp_path: Path) -> None:
    write_token_file(tmp_path / "tokens.bin", [np.arange(1000) % 200], vocab_size=257)
    flags = "--input-bin tokens.bin --run-dir run --sample-every 3 --sample-num-tokens 5"
    code, _, _ = shiplap_command(f"{MODEL} {flags}")
    assert code == 0
    assert re.search(r"^(\d+ ){4}\d+$", (tmp_path / "run" / "samples.txt").read_text(), re.MULTILINE)


def test_the_written_options_make_the_same_config_again(shiplap_command: Command, tmp_path: Path) -> None:
    assert shiplap_command(f"{SMALL} --run-dir run --no-tp-comm-overlap-ag")[0] == 0
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["options"]["data"]["total_batch_size"] == 32
    assert written["options"]["parallel"]["tp_comm_overlap_ag"] is False
    assert written["transformer"]["hidden_size"] == 32
    assert written["world_size"] == written["options"]["run"]["nproc"] == 1
    assert written["versions"]["torch"] == torch.__version__

    options = written["options"]
    options["data"]["data"] = tuple(options["data"]["data"])
    again = TrainConfig(
        **{
            group.name: group.type(**options[group.name])  # type: ignore[operator]
            for group in dataclasses.fields(TrainConfig)
        }
    )
    assert json.loads(json.dumps(dataclasses.asdict(again))) == json.loads(json.dumps(options))


def test_missing_extras_are_said_once_and_change_nothing_else(
    shiplap_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("tensorboard", "torch.utils.tensorboard", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, missing, None)
    code, out, _ = shiplap_command(f"{SMALL} --run-dir run")
    assert code == 0
    assert out.count("pip install 'shiplap[train]'") == 2
    assert "TensorBoard events are not written" in out
    assert "The loss curve is not drawn" in out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "metrics.jsonl"}


def test_a_gradient_that_is_not_finite_ends_the_run_and_names_the_step(shiplap_command: Command) -> None:
    flags = "--learning-rate 1e30 --warmup-iteration 0"
    code, out, err = shiplap_command(f"{SMALL} {flags}")
    assert code == 2
    assert re.search(r"step [23]/3: the gradient's norm is (nan|inf).*--learning-rate", err)
    assert "step 1/3" in out
    assert "Traceback" not in err


def test_ctrl_c_ends_without_a_traceback(
    shiplap_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shiplap.train.validation.read_together", interrupt)
    code, _, err = shiplap_command(f"{SMALL} --run-dir run --val-loss-every 2")
    assert (code, err) == (130, "")
    # What there is of it is kept.
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_run_folder_is_never_written_over(tmp_path: Path) -> None:
    asked = str(tmp_path / "run")
    first = claim_run_folder(asked, "gpt2")
    assert first == tmp_path / "run"
    # The parent makes it, a worker takes it.
    assert claim_run_folder(asked, "gpt2") == first
    (first / "metrics.jsonl").touch()
    assert claim_run_folder(asked, "gpt2") == tmp_path / "run-2"


def test_runs_that_start_in_the_same_second_get_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {claim_run_folder(None, "gpt2") for _ in range(3)}
    assert len(folders) == 3
    assert all(re.fullmatch(r"runs/gpt2-\d{8}-\d{6}(-\d)?", str(folder)) for folder in folders)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "shiplap", "train", "gpt2", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, "")
