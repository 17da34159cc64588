"""Writing over several ranks: the cache changes nothing, and tokens are those that `transformers` writes."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.checkpoint import load_huggingface
from shiplap.generation import generate
from shiplap.generation.options import SamplingOptions
from shiplap.layers.cache import KeyValueCache
from tests.cases import models
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]


@torch.no_grad()
def cache_errors(
    config: ModelParallelConfig, name: str, dtype: torch.dtype, *, device: str = "cpu"
) -> dict[str, float]:
    """How far the logits of 13 tokens are off if they are computed in several passes, some of one token."""
    env = init_all_env(config, device=device)
    model = models.build(name, config, env.group("tp")).to(env.device).eval()
    tokens = models.batch()[0].to(env.device)
    errors = {}
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = model(tokens)
        cache = KeyValueCache(models.SEQUENCE, models.BATCH)
        for passes in ((5, 1, 1, 3, 1, 2), (1, 12)):
            cache.clear()
            parts = tokens.split(passes, dim=1)
            logits = torch.cat([model(part, cache=cache) for part in parts], dim=1)
            errors[f"passes over {passes}"] = float((logits - expected).norm() / expected.norm())
        last = model(tokens, last_only=True)
        errors["the last only"] = float((last - expected[:, -1:]).norm() / expected[:, -1:].norm())
    destroy_all_env()
    return errors


TOPOLOGIES = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@pytest.mark.parametrize(
    ("num_ranks", "sequence_parallel", "name"),
    [
        *((*topology, name) for topology in TOPOLOGIES for name in ("gpt2", "llama3", "qwen3", "mixtral")),
        *((4, True, f"llama3, {heads} key-value heads") for heads in (1, 2, 3)),
    ],
)
def test_logits_with_a_cache_are_those_without(
    ranks: Ranks, *, num_ranks: int, sequence_parallel: bool, name: str
) -> None:
    """13 tokens, a number that no TP size divides, and a single one: what pads them must not get into the cache."""
    config = ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=sequence_parallel)
    # The same products over other numbers of rows, which are summed in another order: 2^-24 each, as in test_models.
    for errors in ranks(num_ranks).run(cache_errors, config, name, torch.float32):
        assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), [(1, False), (2, True)])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3", "mixtral, all experts"])
def test_so_they_are_in_bfloat16(ranks: Ranks, *, num_ranks: int, sequence_parallel: bool, name: str) -> None:
    """Under autocast. Where not all experts are taken, near a tie others would be."""
    config = ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=sequence_parallel)
    # Roundings of 2^-9, as in test_models.
    for errors in ranks(num_ranks).run(cache_errors, config, name, torch.bfloat16):
        assert max(errors.values()) < 8e-2, errors


LENGTH = 20


def _published() -> dict[str, Any]:
    """A small model of each family, as `transformers` makes it; and two with few key-value heads."""
    import transformers

    torch.manual_seed(0)
    llama: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    gpt2 = transformers.GPT2Config(
        vocab_size=257,
        n_embd=48,
        n_layer=2,
        n_head=12,
        n_positions=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        **{
            f"llama3, {heads} key-value heads": transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**llama, num_key_value_heads=heads)
            )
            for heads in (1, 3, 4)
        },
        "qwen3": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**llama, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True)
        ),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**llama, num_key_value_heads=4, num_local_experts=4)
        ),
    }


PROMPTS = torch.randint(257, (3, 7), generator=torch.Generator().manual_seed(1))
NAMES = ["gpt2", *(f"llama3, {heads} key-value heads" for heads in (1, 3, 4)), "qwen3", "mixtral"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, torch.Tensor]]:
    """Each model's folder, and the tokens with which `transformers` goes on, the likeliest each time."""
    folder, results = tmp_path_factory.mktemp("published"), {}
    for name, model in _published().items():
        model.eval().save_pretrained(folder / name.replace(" ", "-"))
        mask = torch.ones_like(PROMPTS)
        tokens = model.generate(PROMPTS, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        results[name] = str(folder / name.replace(" ", "-")), tokens[:, PROMPTS.shape[1] :]
    return results


def likeliest(num_ranks: int, directory: str, stop_tokens: tuple[int, ...]) -> list[list[int | None]]:
    env = init_all_env(tensor_parallel_size=num_ranks, device="cpu")
    loaded = load_huggingface(directory, parallel=env.config, group=env.group("tp"))
    steps = generate(
        loaded.model.eval(),
        PROMPTS,
        num_tokens=LENGTH,
        max_sequence_length=loaded.config.max_sequence_length,
        sampling=SamplingOptions(temperature=0.0),
        stop_tokens=stop_tokens,
        group=env.group("tp"),
    )
    texts = [list(tokens) for tokens in zip(*steps, strict=True)]
    destroy_all_env()
    return texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_likeliest_tokens_are_those_of_transformers(
    ranks: Ranks, published: dict[str, tuple[str, torch.Tensor]], num_ranks: int, name: str
) -> None:
    directory, expected = published[name]
    assert len({tuple(tokens) for tokens in expected.tolist()}) == len(PROMPTS)
    for texts in ranks(num_ranks).run(likeliest, num_ranks, directory, ()):
        assert texts == expected.tolist()


def test_all_ranks_stop_where_transformers_does(ranks: Ranks, published: dict[str, tuple[str, torch.Tensor]]) -> None:
    directory, expected = published["llama3, 4 key-value heads"]
    stops = int(expected[0, 5]), int(expected[1, 9])
    ends = [next((i for i, token in enumerate(text) if token in stops), LENGTH) for text in expected.tolist()]
    wanted = [
        [token if i < end else None for i, token in enumerate(text)][: max(ends)]
        for text, end in zip(expected.tolist(), ends, strict=True)
    ]
    for texts in ranks(2).run(likeliest, 2, directory, stops):
        assert texts == wanted


def shiplap(num_ranks: int, ranks: Ranks, arguments: str) -> tuple[int, str, str]:
    """Run `shiplap` on so many ranks: exit code, output and errors of rank 0; the others are silent."""
    (code, out, err), *others = ranks(num_ranks).run(command, [arguments])
    assert all(result == (code, "", "") for result in others), others
    return code, out, err


SPEED = r"prompt: 4 tokens in \d+\.\d\d s \(\d+\.\d tokens/s\); then \d+ tokens in \d+\.\d\d s \(\d+\.\d tokens/s\)\n"


@pytest.mark.parametrize(("name", "sizes"), [("gpt2", (2, 4)), ("mixtral", (2,))])
def test_the_same_seed_writes_the_same_text_on_any_number_of_ranks(
    ranks: Ranks, published: dict[str, tuple[str, torch.Tensor]], name: str, sizes: tuple[int, ...]
) -> None:
    flags = f"{published[name][0]} --prompt Once --num-tokens 15 --top-p 0.95 --seed 7"
    code, alone, err = shiplap(1, ranks, f"generate {flags}")
    assert code == 0
    assert alone.startswith("Once")
    assert re.fullmatch(SPEED, err), err
    for num_ranks in sizes:
        code, out, err = shiplap(num_ranks, ranks, f"generate {flags} --tensor-parallel {num_ranks}")
        assert (code, out) == (0, alone)
        assert re.fullmatch(SPEED, err), err


def test_a_launcher_with_other_ranks_is_refused_once(
    ranks: Ranks, published: dict[str, tuple[str, torch.Tensor]]
) -> None:
    code, out, err = shiplap(2, ranks, f"generate {published['gpt2'][0]} --prompt Once")
    assert (code, out) == (2, "")
    assert "--tensor-parallel 1" in err
    assert "started 2" in err
    code, _, err = shiplap(2, ranks, f"generate {published['gpt2'][0]} --prompt-file - --tensor-parallel 2")
    assert (code, "--prompt-file -" in err) == (2, True)


def test_shiplap_starts_its_own_workers_and_passes_on_what_it_reads(
    published: dict[str, tuple[str, torch.Tensor]],
) -> None:
    """The prompt is what the standard input holds, to the letter, line break and all."""
    directory, _ = published["qwen3"]
    flags = ["--prompt-file", "-", "--num-tokens", "12", "--num-samples", "2", "--dtype", "bfloat16", "--no-stop"]
    process = subprocess.run(
        [sys.executable, "-m", "shiplap", "generate", directory, *flags, "--tensor-parallel", "2"],
        input="Öl --prompt\n".encode(),
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    out = process.stdout.decode()
    assert re.match(r"--- sample 1/2 ---\nÖl --prompt\n", out)
    assert "\n--- sample 2/2 ---\nÖl --prompt\n" in out
    assert re.fullmatch(r"prompt: 13 tokens .*; then 22 tokens .*\n", process.stderr.decode())


def test_a_reader_that_has_seen_enough_ends_all_ranks(published: dict[str, tuple[str, torch.Tensor]]) -> None:
    arguments = [published["gpt2"][0], "--prompt", "Once", "--num-tokens", "1000000", "--tensor-parallel", "2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "shiplap", "generate", *arguments], stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(8).startswith(b"Once")  # it comes as it is written
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 141
    assert re.fullmatch(r"The model's context is 64 tokens\. .*\n", errors), errors
