"""llm.c's model files: what their header says, and which are refused."""

import re
from pathlib import Path

import pytest
import torch

from shiplap.checkpoint.llmc import LlmcFiles
from shiplap.checkpoint.llmc_header import read_llmc_header
from shiplap.commands.main import main
from shiplap.config import TransformerConfig, UserError
from shiplap.config.model import RopeScaling
from tests.cases import llmc

GPT2_SIZE = 1024 + 4 * (
    (llmc.PADDED + llmc.LENGTH) * 64 + 2 * (64 * 2 + 192 * 65 + 64 * 65 + 64 * 2 + 256 * 65 + 64 * 257) + 128
)
# With a feed-forward size of 32.
LLAMA3_SIZE = 4 * (2 * 37 * 64 + 2 * (64 + 128 * 64 + 64 * 64 + 64 + 3 * 32 * 64) + 64)
MORE_FFN = 4 * 2 * 3 * 32 * 64


def test_header_of_gpt2(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(llmc.gpt2_header() + bytes(GPT2_SIZE - 1024))
    header = read_llmc_header(path)
    assert (header.family, header.dtype) == ("gpt2", "float32")
    assert header.config == TransformerConfig(
        vocab_size=37,
        hidden_size=64,
        num_layers=2,
        num_attention_heads=8,
        ffn_hidden_size=256,
        max_sequence_length=16,
    )
    assert header.tensors["transformer.wte.weight"].shape == (37, 64)


@pytest.mark.parametrize(
    ("start", "size", "scaling"),
    [
        (llmc.llama3_header(), LLAMA3_SIZE, RopeScaling(factor=8.0)),
        (llmc.llama3_header(scaled=0), LLAMA3_SIZE, None),
        (llmc.llama3_branch_header(), None, RopeScaling(factor=8.0)),
        # Only published weights of LLaMA 3.2 are written so, and these were trained with 32.
        (llmc.llama3_branch_header(minor=2), None, RopeScaling(factor=32.0)),
    ],
)
def test_header_of_llama3(tmp_path: Path, *, start: bytes, size: int | None, scaling: RopeScaling | None) -> None:
    biases = 4 * (2 * (64 + 128 + 64 + 64 + 2 * 32 + 64) + 64)
    more_biases = 4 * 2 * 2 * 32
    payload = LLAMA3_SIZE + 2 * MORE_FFN + (0 if size else biases + 2 * more_biases)
    path = tmp_path / "model.bin"
    path.write_bytes(start + bytes(payload))
    header = read_llmc_header(str(path))
    assert (header.family, header.num_bytes) == ("llama3", len(start))
    assert header.config == TransformerConfig(
        vocab_size=37,
        hidden_size=64,
        num_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        ffn_hidden_size=96,
        max_sequence_length=16,
        norm_epsilon=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_embeddings=False,
    )


def test_any_part_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    numbers = torch.arange((GPT2_SIZE - 1024) // 4, dtype=torch.int32).view(torch.float32)
    path.write_bytes(llmc.gpt2_header() + numbers.numpy().tobytes())
    files = LlmcFiles(path)
    start = (llmc.PADDED + llmc.LENGTH) * 64 + 4 * 64 + 192 * 64
    second = numbers[start : start + 192 * 64].view(192, 64)
    for index in ((slice(None), slice(None)), (slice(5, 70), slice(None)), (slice(190, 192), slice(3, 10))):
        part = files.read("transformer.h.1.attn.c_attn.weight", index)
        assert torch.equal(part.view(torch.int32), second[index].view(torch.int32))


GPT2 = llmc.gpt2_header()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes, where the header alone takes 1024"),
        (b"x" * 100, "truncated: 100 bytes, where the header alone takes 1024"),
        (GPT2 + bytes(GPT2_SIZE - 1028), rf"truncated: .* make {GPT2_SIZE} bytes, but it has {GPT2_SIZE - 4} bytes"),
        (GPT2 + bytes(GPT2_SIZE), rf"too long: .* make {GPT2_SIZE} bytes, but it has {GPT2_SIZE + 1024} bytes"),
        (llmc.header(1, 3), r"magic number is 1, not 20240326 \(GPT-2\) or 20240803 \(LLaMA 3\)"),
        (llmc.header(20240520, 1, 0), "holds tokens, for --input-bin"),
        (llmc.header(20240801, 7, 0), "holds tokens, for --input-bin"),
        (llmc.header(20240327, 2, 4, 64), "holds a debug state"),
        (
            llmc.gpt2_header(1),
            r"version 1, where 3 \(float32\) and 5 \(bfloat16\) can be read.* with llm.c as it is now",
        ),
        (llmc.llama3_header(4), r"version 4, where 3 \(float32\) and 5 \(bfloat16\) can be read"),
        (llmc.header(20240326, 3), "its header makes no model: --vocab-size must be at least 1, got 0"),
        (llmc.header(20240326, 3, 16, 37, 2, 8, 64, 36), "padded vocabulary of 36 is smaller than .* of 37"),
        (llmc.header(20240326, 3, 16, 37, 10**9, 8, 64, 128), "truncated: .* make 199936000038400 bytes"),
        (llmc.header(20240803, 3, 16, 37, 2, 8, 4, 64, 32, 1), "no major version 3, neither 0 nor 0 is"),
        (llmc.header(20240803, 3, 16, 37, 2, 8, 4, 56, 1, 32, 0, 500000, 1, 4, 3, 1), "heads of odd size 7"),
        (
            llmc.llama3_header() + bytes(LLAMA3_SIZE + 4),
            rf"{LLAMA3_SIZE + 4} bytes follow its header.* multiple of 32, it would be {LLAMA3_SIZE} or "
            rf"{LLAMA3_SIZE + MORE_FFN}",
        ),
        (llmc.llama3_header() + bytes(LLAMA3_SIZE - 4), rf"{LLAMA3_SIZE - 4} bytes .* it would be {LLAMA3_SIZE}\."),
        (llmc.llama3_header() + bytes(LLAMA3_SIZE - MORE_FFN), rf"it would be {LLAMA3_SIZE}\."),
    ],
)
def test_bad_file_is_refused_by_name_and_numbers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: .*{message}"):
        LlmcFiles(path)


@pytest.mark.parametrize(("name", "reason"), [("nowhere.bin", "No such file"), ("", "Is a directory")])
def test_unreadable_file_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{name}: cannot read it: {reason}"):
        LlmcFiles(tmp_path / name)


def test_another_family_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(llmc.gpt2_header() + bytes(GPT2_SIZE - 1024))
    with pytest.raises(UserError, match=r"model.bin holds a gpt2 model, not llama3. Use `shiplap train gpt2`"):
        LlmcFiles(path, family="llama3")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("gpt2 --llmc-filepath nowhere.bin", ["nowhere.bin: cannot read it: No such file"]),
        (
            "gpt2 --llmc-filepath model.bin --sequence-length 8",
            ["--llmc-filepath model.bin", "vocabulary of 37", "--tokenizer"],
        ),
        ("llama3 --llmc-filepath model.bin", ["model.bin holds a gpt2 model, not llama3", "shiplap train gpt2"]),
        ("qwen3 --llmc-filepath model.bin", ["model.bin holds a gpt2 model, not qwen3"]),
        ("gpt2 --llmc-filepath model.bin --preset gpt2-124m", ["--preset gpt2-124m", "--llmc-filepath model.bin"]),
        ("gpt2 --llmc-filepath model.bin --num-layers 3", ["--num-layers 3", "--llmc-filepath model.bin"]),
        ("gpt2 --llmc-filepath model.bin --hf-checkpoint x", ["--hf-checkpoint x and --llmc-filepath model.bin"]),
        ("gpt2 --llmc-filepath model.bin --max-sequence-length 8", ["--max-sequence-length 8", "16 positions"]),
        ("gpt2 --llmc-filepath model.bin --tensor-parallel 3", ["64", "--tensor-parallel 3"]),
    ],
)
def test_train_refuses_what_does_not_fit_the_file(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    arguments: str,
    named: list[str],
) -> None:
    (tmp_path / "model.bin").write_bytes(llmc.gpt2_header() + bytes(GPT2_SIZE - 1024))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments.split()]) == 2
    shown = capsys.readouterr()
    for part in named:
        assert part in shown.err, shown.err
    assert "Traceback" not in shown.out + shown.err
