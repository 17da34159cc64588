"""Writing, in one process: which token is drawn, how tokens become text, and what happens when the context is full."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from shiplap import ModelParallelConfig
from shiplap.checkpoint import newest_checkpoint
from shiplap.data import ByteTokenizer, HuggingFaceTokenizer
from shiplap.generation import generate
from shiplap.generation.decode import Chooser, probabilities
from shiplap.generation.options import SamplingOptions
from shiplap.generation.write import TextStream
from shiplap.layers.cache import KeyValueCache
from tests.cases.models import CONFIGS, VOCABULARY, build


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.9, 1.0])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3.0 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)

    weights, tokens = probabilities(logits, SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p))
    found = torch.zeros(5, 100, dtype=torch.float64).scatter(1, tokens, weights / weights.sum(-1, keepdim=True))
    assert torch.equal(found > 0, expected.isfinite())
    torch.testing.assert_close(found, expected.double().softmax(-1), rtol=1e-5, atol=1e-9)


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    """20,000 draws: a count's standard deviation is at most 71, and none is off by more than 5 of them."""
    options = SamplingOptions(temperature=1.0, top_k=0, seed=3)
    shares = torch.tensor([0.5, 0.0, 0.3, 0.0, 0.15, 0.05])
    drawn = Chooser(options, 20_000)(shares.log().expand(20_000, -1))
    assert torch.allclose(drawn.bincount(minlength=6).double(), 20_000 * shares.double(), atol=5 * 71)
    assert not torch.isin(drawn, torch.tensor([1, 3])).any()


def test_the_likeliest_token_is_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 1.0, 3.0, 3.0]])
    assert Chooser(SamplingOptions(temperature=0.0), 2)(logits).tolist() == [1, 0]


def test_a_tiny_temperature_is_as_good_as_none() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    drawn = Chooser(SamplingOptions(temperature=1e-40, top_k=0), 4)(logits)
    assert torch.equal(drawn, logits.argmax(-1))


def model_of(name: str) -> nn.Module:
    return build(name, ModelParallelConfig(), None).eval()


def written(model: nn.Module, prompts: list[list[int]], num_tokens: int, **sampling: float) -> list[list[int | None]]:
    """What `generate` yields, text by text."""
    num_samples = sampling.pop("num_samples", None)
    options = SamplingOptions(**sampling)  # type: ignore[arg-type]
    steps = generate(
        model,
        torch.tensor(prompts),
        num_tokens=num_tokens,
        max_sequence_length=16,
        sampling=options,
        num_samples=None if num_samples is None else int(num_samples),
    )
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def test_a_text_depends_on_its_own_seed_only() -> None:
    model = model_of("llama3")
    three = written(model, [[1, 2, 3]], 10, num_samples=3, seed=5)
    assert len({tuple(tokens) for tokens in three}) == 3
    for number, tokens in enumerate(three):
        assert written(model, [[1, 2, 3]], 10, seed=5 + number) == [tokens]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_equally_long_prompts_are_written_on_as_if_alone(name: str) -> None:
    model, prompts = model_of(name), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    together = written(model, prompts, 10, temperature=0.0)
    assert together == [written(model, [prompt], 10, temperature=0.0)[0] for prompt in prompts]


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@pytest.mark.parametrize("length", [3, 16])
def test_a_full_context_goes_on_with_its_later_half(name: str, length: int) -> None:
    """The model takes 16 tokens: against computing everything anew for every token."""
    model = model_of(name)
    torch.manual_seed(0)
    prompts = torch.randint(VOCABULARY, (2, length))
    tokens, start = prompts, 0
    for _ in range(40):
        if tokens.shape[1] - start > 16:
            start = tokens.shape[1] - 8
        with torch.no_grad():
            logits = model(tokens[:, start:])[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert written(model, prompts.tolist(), 40, temperature=0.0) == tokens[:, length:].tolist()


def test_texts_end_at_stop_tokens_each_by_itself() -> None:
    model = model_of("gpt2")
    whole = written(model, [[1]], 12, num_samples=2, temperature=1.0, top_k=0)
    stop = next(token for i, token in enumerate(whole[0]) if i >= 2 and token not in whole[0][:i])
    assert stop is not None

    def with_stops(*stops: int) -> Iterator[list[int | None]]:
        return generate(
            model,
            torch.tensor([[1]]),
            num_tokens=12,
            max_sequence_length=16,
            sampling=SamplingOptions(temperature=1.0, top_k=0),
            num_samples=2,
            stop_tokens=stops,
        )

    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in whole]
    steps = list(with_stops(stop))
    assert [[token for token in tokens if token is not None] for tokens in zip(*steps, strict=True)] == expected
    assert len(steps) == max(map(len, expected))
    # All end at once: nothing is written.
    assert list(with_stops(*range(VOCABULARY))) == []


@pytest.mark.parametrize(
    ("shape", "num_samples", "message"),
    [((1, 0), 1, "0 tokens.* 1 … 16"), ((1, 17), 1, "17 tokens.* 1 … 16"), ((2, 3), 3, "2 prompts for 3 samples")],
)
def test_prompts_that_do_not_fit_are_refused(shape: tuple[int, int], num_samples: int, message: str) -> None:
    prompts = torch.zeros(shape, dtype=torch.long)
    options = SamplingOptions()
    with pytest.raises(ValueError, match=message):
        next(
            generate(
                model_of("gpt2"),
                prompts,
                num_tokens=1,
                max_sequence_length=16,
                sampling=options,
                num_samples=num_samples,
            )
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_any_type_write(dtype: torch.dtype) -> None:
    """Every family; the default type when a model is made is that of its parameters, down to the last."""
    for name in CONFIGS:
        torch.set_default_dtype(dtype)
        try:
            model = model_of(name)
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert len(written(model, [[1, 2, 3]], 5)[0]) == 5


@pytest.mark.parametrize(("num_tokens", "capacity"), [(4, 6), (40, 16)])
def test_the_cache_is_no_larger_than_the_text(monkeypatch: pytest.MonkeyPatch, num_tokens: int, capacity: int) -> None:
    """A published model's context can take gigabytes. The last token is never computed, so it needs no place."""
    made = []

    def cache(*sizes: int) -> KeyValueCache:
        made.append(sizes)
        return KeyValueCache(*sizes)

    monkeypatch.setattr("shiplap.generation.decode.KeyValueCache", cache)
    assert len(written(model_of("gpt2"), [[1, 2, 3]], num_tokens)[0]) == num_tokens
    assert made == [(capacity, 1)]


TEXT = "ünïcode 🚢🚢 日本語 and plain"


def byte_level() -> Tokenizer:
    """As GPT-2's and LLaMA 3's, but that every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback() -> Tokenizer:
    """As LLaMA 2's and Mixtral's: words with a leading space, and bytes where there is no word."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁and", "▁plain", "▁", "n", "c"]
    vocabulary = [(piece, 0.0 if piece.startswith("▁") else -10.0) for piece in pieces]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize("kind", ["bytes", "byte level", "byte fallback"])
def test_text_comes_in_whole_characters(tmp_path: Path, kind: str) -> None:
    tokenizer: ByteTokenizer | HuggingFaceTokenizer = ByteTokenizer()
    if kind != "bytes":
        backend = byte_level() if kind == "byte level" else byte_fallback()
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = HuggingFaceTokenizer(str(tmp_path))
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    for cut in range(len(tokens)):
        if tokenizer.decode(tokens[:cut]).endswith("\ufffd"):
            continue  # no prompt ends within a character
        stream = TextStream(tokenizer, tokens[:cut])
        pieces = [stream.push(token) for token in tokens[cut:]]
        assert "".join(pieces) == TEXT.removeprefix(tokenizer.decode(tokens[:cut]))
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.end() == ""


def test_undecodable_text_comes_late_but_comes() -> None:
    # A broken character before text, then one that never ends.
    stream = TextStream(ByteTokenizer(), [])
    assert [stream.push(token) for token in (0xE2, 0x82, 65, 0xFF, 0xFE, 66, 0xF0, 0x9F)] == [
        *("", "", "\ufffdA", "", "", "\ufffd\ufffdB", "", "")
    ]
    assert stream.end() == "\ufffd"


def test_any_bytes_become_the_same_text_as_all_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tokens = torch.randint(257, (60,), generator=generator).tolist()
        stream = TextStream(ByteTokenizer(), [])
        pieces = [stream.push(token) for token in tokens]
        assert "".join([*pieces, stream.end()]) == ByteTokenizer().decode(tokens)


def test_a_prompt_has_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    backend = byte_fallback()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.encode_prompt("and") == [1, *tokenizer.encode("and")]
    assert ByteTokenizer().encode_prompt("and") == list(b"and")


def test_the_newest_checkpoint_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path)
    for name in ("step-9", "step-10", "step-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "step-11").mkdir()  # not finished
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "step-10")
    (tmp_path / "config.json").touch()
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path)


def test_writing_goes_on_while_it_is_read() -> None:
    """Nothing is drawn before it is asked for."""
    options = SamplingOptions()
    steps = generate(model_of("gpt2"), torch.tensor([[1]]), num_tokens=10**6, max_sequence_length=16, sampling=options)
    assert len(list(islice(steps, 5))) == 5
