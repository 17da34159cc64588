"""llm.c's model files: against `transformers`, which holds the same weights, and through `shiplap train`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.checkpoint import load_llmc
from shiplap.data import write_token_file
from tests.cases import llmc, published
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import metrics


def logits(path: str, family: str, num_ranks: int) -> Tensor:
    parallel = ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=num_ranks > 1)
    env = init_all_env(parallel, device="cpu")
    loaded = load_llmc(path, family=family, parallel=parallel, group=env.group("tp"))
    with torch.no_grad():
        found: Tensor = loaded.model(published.tokens())
    destroy_all_env()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "write"),
    [("gpt2", llmc.write_gpt2), ("llama3", llmc.write_llama3), ("llama3", llmc.write_llama3_branch)],
)
def test_logits_are_those_of_transformers(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    *,
    family: str,
    write: Callable[[Path, dict[str, Tensor], torch.dtype], None],
    dtype: torch.dtype,
) -> None:
    model = published.model(family, dtype)
    path = tmp_path / "model.bin"
    write(path, model.state_dict(), dtype)
    with torch.no_grad():
        expected = model(published.tokens()).logits
    for num_ranks in (1, 2, 4):
        for found in ranks(num_ranks).run(logits, str(path), family, num_ranks):
            # float32, some hundred operations deep, over logits of up to 6; largest seen: 6e-6.
            torch.testing.assert_close(found, expected, rtol=0.0, atol=5e-5)


@pytest.mark.parametrize(("family", "write"), [("gpt2", llmc.write_gpt2), ("llama3", llmc.write_llama3)])
def test_training_begins_with_the_weights_of_the_file(
    ranks: Callable[[int], RankPool], tmp_path: Path, *, family: str, write: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    """At a learning rate of 0 they are also what it ends with."""
    model = published.model(family)
    write(tmp_path / "model.bin", model.state_dict())
    model.save_pretrained(tmp_path / "model")
    write_token_file(tmp_path / "tokens.bin", [np.arange(1000) % llmc.VOCABULARY], vocab_size=llmc.VOCABULARY)
    flags = f"--llmc-filepath {tmp_path}/model.bin --input-bin {tmp_path}/tokens.bin --save {tmp_path}/saved"
    flags += " --sequence-length 15 --batch-size 2 --num-iteration 1 --learning-rate 0 --tensor-parallel 2"
    [line] = metrics(ranks(2), f"train {family} {flags}", tmp_path / "run")
    assert line["train_loss"] > 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved/step-1"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
