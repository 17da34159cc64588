"""Models of transformers, loaded from its own files: the same logits, the same gradients, and back again."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shiplap.data import write_token_file
from tests.cases import huggingface as cases
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import OVERLAP, metrics

Ranks = Callable[[int], RankPool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model of transformers, and what it is called here."""

    family: str
    make: Callable[..., Any]

    def __call__(self, **changes: object) -> Any:
        """The model, no parameter of which has a trivial value."""
        torch.manual_seed(3)
        model: Any = self.make(**changes).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model


def _gpt2(**changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": cases.VOCABULARY,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 12,
        "n_inner": 96,
        "n_positions": 32,
        "initializer_range": 0.3,
    }
    no_dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | no_dropout | _TOKENS | changes)))


def _like_llama(config: Any, model: Any, **changes: Any) -> Any:
    """Twelve heads whose size is not H / heads."""
    sizes: dict[str, Any] = {
        "vocab_size": cases.VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "head_dim": 10,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    return model(config(**(sizes | _TOKENS | changes)))


_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
# Wavelengths in all three ranges of the stretching.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_llama = partial(_like_llama, transformers.LlamaConfig, transformers.LlamaForCausalLM)
_qwen3 = partial(_like_llama, transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
_mixtral = partial(
    _like_llama,
    transformers.MixtralConfig,
    transformers.MixtralForCausalLM,
    num_local_experts=4,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.5,
)
CASES = {
    "gpt2": Case(family="gpt2", make=_gpt2),
    "gpt2, untied": Case(family="gpt2", make=partial(_gpt2, tie_word_embeddings=False)),
    "llama3, 1 key-value head": Case(
        family="llama3", make=partial(_llama, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "llama3, 3 key-value heads, stretched": Case(
        family="llama3", make=partial(_llama, num_key_value_heads=3, rope_parameters=_ROPE)
    ),
    "qwen3, 2 key-value heads, tied": Case(
        family="qwen3", make=partial(_qwen3, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "qwen3, 12 key-value heads": Case(family="qwen3", make=partial(_qwen3, num_key_value_heads=12)),
    "mixtral, 3 key-value heads": Case(family="mixtral", make=partial(_mixtral, num_key_value_heads=3)),
    "mixtral, 2 key-value heads, tied": Case(
        family="mixtral", make=partial(_mixtral, num_key_value_heads=2, tie_word_embeddings=True, num_local_experts=3)
    ),
}


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logits. transformers balances the experts of all layers together, shiplap those of each."""
    if model.config.model_type != "mixtral":
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits
    out = model(tokens, output_router_logits=True)
    sizes = model.config.num_local_experts, model.config.num_experts_per_tok
    balances = [load_balancing_loss_func((layer,), *sizes) for layer in out.router_logits]
    balance = sum(balances) / len(balances)
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    return loss + model.config.router_aux_loss_coef * balance, out.logits


def _stored_gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every gradient by the name of its tensor in files; there experts stand apart."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        layer, is_expert, kind = name.partition("mlp.experts.")
        if is_expert:
            for expert, gradient in enumerate(parameter.grad):
                parts = (
                    dict(zip(("w1", "w3"), gradient.chunk(2), strict=True))
                    if kind == "gate_up_proj"
                    else {"w2": gradient}
                )
                for part, value in parts.items():
                    yield f"{layer}block_sparse_moe.experts.{expert}.{part}.weight", value
        else:
            router = model.config.model_type == "mixtral"
            yield name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if router else name, parameter.grad


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A case's directory, with what transformers computes from it; made once."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            model = CASES[name]()
            model.save_pretrained(folder)
            loss, logits = _loss(model, *cases.batch())
            loss.backward()
            expected = {"loss": loss.detach(), "logits": logits.detach(), **dict(_stored_gradients(model))}
            torch.save(expected, folder / cases.EXPECTED_FILE)
            # Else there would be little to compare.
            assert logits.std() > 0.5
            made[name] = str(folder)
        return made[name]

    return make


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_logits_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, directory: Callable[[str], str], *, num_ranks: int, name: str
) -> None:
    """Float32 on both sides, whose sums differ in order."""
    for errors in ranks(num_ranks).run(cases.largest_errors, num_ranks, directory(name)):
        for topology, error in errors.items():
            logits, gradients = error["logits"], {key: e for key, e in error.items() if key not in ("loss", "logits")}
            print(f"{name}, {topology}: logits {logits:.1e}, gradients {max(gradients.values()):.1e}")
            assert logits <= 1e-4, topology
            assert error["loss"] <= 1e-4, topology
            assert all(e <= 1e-4 for e in gradients.values()), (topology, gradients)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in a directory's weight files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, torch.bfloat16), (4, torch.float32)])
def test_what_is_loaded_and_saved_is_the_same_to_the_bit(
    ranks: Ranks, directory: Callable[[str], str], tmp_path: Path, *, num_ranks: int, dtype: torch.dtype, name: str
) -> None:
    source, target = Path(directory(name)), tmp_path / "saved"
    if dtype == torch.bfloat16:
        source = tmp_path / "source"
        CASES[name]().to(dtype).save_pretrained(source, max_shard_size="30KB")
        assert (source / "model.safetensors.index.json").exists()
    ranks(num_ranks).run(cases.load_and_save, num_ranks, str(source), str(target), dtype)

    assert (target / "model.safetensors.index.json").exists()
    before, after = _tensors(source), _tensors(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) and after[key].dtype == dtype for key, value in before.items())
    models: Any = [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (source, target)]
    assert models[0].dtype == models[1].dtype == dtype
    tokens, _ = cases.batch()
    with torch.no_grad():
        assert torch.equal(*(model.eval()(tokens).logits for model in models))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_save_that_fails_leaves_no_rank_waiting(ranks: Ranks, directory: Callable[[str], str]) -> None:
    source = directory("gpt2")
    assert ranks(4).run(cases.save_where_something_is, 4, source) == [
        f"{source} is there already, and nothing is written over. Name another folder.",
        *3 * [""],
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of words, the same every time."""
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    words = ["the", "rain", "fell", "in", "torrents", "except", "at", "occasional", "intervals", "when"]
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 4000)))
    return path


def test_one_replica_saves(ranks: Ranks, directory: Callable[[str], str], tmp_path: Path) -> None:
    write_token_file(tmp_path / "tokens.bin", [np.arange(1000) % cases.VOCABULARY], vocab_size=cases.VOCABULARY)
    flags = (
        f"train qwen3 --hf-checkpoint {directory('qwen3, 12 key-value heads')} --input-bin {tmp_path}/tokens.bin "
        f"--tensor-parallel 2 --batch-size 1 --sequence-length 15 --num-iteration 1 --learning-rate 0 "
        f"--save {tmp_path}/saved"
    )
    metrics(ranks(4), flags, tmp_path / "run")
    before, after = _tensors(Path(directory("qwen3, 12 key-value heads"))), _tensors(tmp_path / "saved" / "step-1")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CASES if "tied" in name or name == "llama3, 1 key-value head"])
def test_one_command_fine_tunes_and_saves_what_transformers_loads(
    ranks: Ranks, corpus: Path, tmp_path: Path, *, name: str, dtype: str
) -> None:
    changes = {"vocab_size": 257, "initializer_range": 0.05}
    before = CASES[name](**changes)
    before.save_pretrained(tmp_path / "model")
    flags = (
        f"train {CASES[name].family} --hf-checkpoint {tmp_path}/model --data {corpus} --dtype {dtype} "
        f"--tensor-parallel 2 {OVERLAP} --batch-size 4 --sequence-length 15 --num-iteration 12 --learning-rate 1e-2 "
        f"--warmup-iteration 2 --save {tmp_path}/saved --save-interval 5"
    )
    lines = metrics(ranks(2), flags, tmp_path / "run")
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] - 0.5

    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"step-5", "step-10", "step-12"}
    text = torch.tensor([list(corpus.read_bytes()[:32])])
    saved = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / step) for step in ("step-5", "step-12")
    ]
    with torch.no_grad():
        losses = [float(_loss(model, text[:, :-1], text[:, 1:])[0]) for model in (before, *saved)]
    assert losses[2] < losses[1] < losses[0]
