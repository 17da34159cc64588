"""Adapters against the PEFT library: on disk, in what they compute, and in their gradients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap import destroy_all_env, init_all_env
from shiplap.checkpoint import load_adapters, load_huggingface, save_adapters
from shiplap.lora import merge
from shiplap.lora.targets import stored_names
from shiplap.tensor_parallel.parameters import gather_to_first, named_placements
from tests.cases import published
from tests.distributed.ranks import RankPool
from tests.distributed.test_models import topology

# PEFT 0.21 asks transformers 5.24 in a way that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
Ranks = Callable[[int], RankPool]
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama3": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["k_proj", "up_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def peft_model(family: str, folder: Path) -> Any:
    """PEFT's model over the one in `folder / "base"`, with factors that do something."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=TARGETS[family],
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    model = get_peft_model(published.load(folder / "base"), config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module", params=list(TARGETS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, dict[str, Tensor]]:
    """A folder with a model and adapters, the adapted logits, and the gradient of every factor."""
    folder = tmp_path_factory.mktemp(family)
    published.model(family).save_pretrained(folder / "base")
    model = peft_model(family, folder)
    model.save_pretrained(folder / "adapters")
    logits = model(published.tokens()).logits
    loss(logits).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return folder, logits.detach(), gradients


def loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), published.tokens()[:, 1:].flatten())


def adapted(num_ranks: int, name: str, folder: Path, save_to: Path | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits with adapters beside the weights and merged into them, and the gradients, by PEFT's names."""
    config = topology(num_ranks, name)
    env = init_all_env(config, device="cpu")
    group = env.group("tp")
    loaded = load_huggingface(str(folder / "base"), parallel=config, group=group)
    model, family, sizes = loaded.model, loaded.family, loaded.config
    adapters = load_adapters(model, str(folder / "adapters"), family=family, config=sizes, group=group)
    logits = model(published.tokens())
    loss(logits).backward()
    gradients: dict[str, Tensor] = {}
    parameters, placements = dict(model.named_parameters()), dict(named_placements(model))
    for ours, stored in stored_names(adapters.targets, rank=adapters.rank).items():
        gradient = parameters[ours].grad
        assert gradient is not None
        whole = gather_to_first(gradient, placements[ours], group)
        if whole is not None:
            parts = whole.split([rows for _, rows in stored.parts])
            gradients |= {part: value for (part, _), value in zip(stored.parts, parts, strict=True)}
    if save_to is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
        save_adapters(model, str(save_to), adapters, family=family, config=sizes, group=group)
    merge(model)
    with torch.no_grad():
        merged = model(published.tokens())
    destroy_all_env()
    return logits.detach(), merged, gradients


@pytest.mark.parametrize(("num_ranks", "name"), [(1, "tp"), (2, "overlap"), (4, "tp"), (4, "sequence_parallel")])
def test_adapters_of_peft_compute_the_same_at_any_tp_size(
    ranks: Ranks, expected: tuple[Path, Tensor, dict[str, Tensor]], num_ranks: int, name: str
) -> None:
    folder, expected_logits, expected_gradients = expected
    results = ranks(num_ranks).run(adapted, num_ranks, name, folder, None)
    for logits, merged, _ in results:
        # float32, a few hundred operations deep.
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(merged, expected_logits, rtol=0, atol=1e-4)
    gradients = results[0][2]
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        error = float((gradient - expected_gradients[key]).norm() / expected_gradients[key].norm())
        assert error < 2e-5, f"{key} is off by {error:.1e}"


def test_adapters_trained_at_tp_2_load_in_peft(
    ranks: Ranks, expected: tuple[Path, Tensor, dict[str, Tensor]], tmp_path: Path
) -> None:
    from peft import PeftModel

    folder, logits_before, _ = expected
    [(_, merged, _), _] = ranks(2).run(adapted, 2, "overlap", folder, tmp_path / "trained")
    model = PeftModel.from_pretrained(published.load(folder / "base"), tmp_path / "trained")
    with torch.no_grad():
        logits = model(published.tokens()).logits
    torch.testing.assert_close(logits, merged, rtol=0, atol=1e-4)
    assert not torch.allclose(logits, logits_before, atol=1e-2), "a step of training changes what is computed"


def test_saved_targets_are_short_names(
    ranks: Ranks, family: str, expected: tuple[Path, Tensor, dict[str, Tensor]], tmp_path: Path
) -> None:
    ranks(1).run(adapted, 1, "tp", expected[0], tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(TARGETS[family])
    assert config["r"] == 3
    assert config["lora_alpha"] == 7
