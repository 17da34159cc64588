"""What ranks do with Hugging Face directories. Knows nothing of transformers, whose import takes seconds."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shiplap import ModelParallelConfig, destroy_all_env, init_all_env
from shiplap.checkpoint import load_huggingface, save_huggingface
from shiplap.config import UserError
from shiplap.families import Stored, huggingface_names
from tests.cases.models import full_parameters
from tests.cases.switches import everything_on

EXPECTED_FILE = "expected.pt"
VOCABULARY, SEQUENCE, BATCH = 203, 13, 3


def topologies(num_ranks: int) -> dict[str, ModelParallelConfig]:
    """TP alone, with sequence parallelism, and with every overlap switch that starts one."""
    tp = ModelParallelConfig(tensor_parallel_size=num_ranks)
    if num_ranks == 1:
        return {"TP 1": tp}
    return {
        f"TP {num_ranks}": tp,
        f"TP {num_ranks} + SP": ModelParallelConfig(tensor_parallel_size=num_ranks, sequence_parallel=True),
        f"TP {num_ranks} + SP + overlap": everything_on(num_ranks),
    }


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets `[B, S]`, some of the targets not counted."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1, 4:9] = -100
    return tokens[:, :-1], targets


def as_stored(whole: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Whole parameters, or their gradients, as the tensors of the files."""
    tensors = {}
    for name, where in stored.items():
        for (stored_name, _), part in zip(
            where.parts, whole[name].split([rows for _, rows in where.parts]), strict=True
        ):
            tensors[stored_name] = part.t() if where.transposed else part
    return tensors


def largest_errors(num_ranks: int, directory: str) -> dict[str, dict[str, float]]:
    """How far loss, logits and gradients are from those in `EXPECTED_FILE`, for each topology.

    Of loss and logits the largest difference; of each gradient the norm of the difference in that of the whole.
    """
    expected: dict[str, Tensor] = torch.load(Path(directory) / EXPECTED_FILE)
    tokens, targets = batch()
    errors: dict[str, dict[str, float]] = {}
    for topology, config in topologies(num_ranks).items():
        env = init_all_env(config, device="cpu")
        group = env.group("tp")
        loaded = load_huggingface(directory, parallel=config, group=group)
        loss, logits = loaded.model(tokens, targets), loaded.model(tokens)
        loss.backward()
        stored = huggingface_names(loaded.family, loaded.config)
        gradients = as_stored(full_parameters(loaded.model, group, grads=True), stored)
        assert gradients.keys() == expected.keys() - {"loss", "logits"}
        here = {"loss": loss.detach(), "logits": logits.detach()}
        errors[topology] = {name: float((value - expected[name]).abs().max()) for name, value in here.items()} | {
            name: float((value - expected[name]).norm() / expected[name].norm()) for name, value in gradients.items()
        }
        destroy_all_env()
    return errors


def save_where_something_is(num_ranks: int, source: str) -> str:
    """Save into the directory that was loaded; what is wrong with that, on the rank that knows."""
    env = init_all_env(ModelParallelConfig(tensor_parallel_size=num_ranks), device="cpu")
    loaded = load_huggingface(source, parallel=env.config, group=env.group("tp"))
    found = ""
    try:
        save_huggingface(
            loaded.model, source, family=loaded.family, config=loaded.config, group=env.group("tp"), dtype=torch.float32
        )
    except UserError as error:
        found = str(error)
    destroy_all_env()
    return found


def load_and_save(num_ranks: int, source: str, target: str, dtype: torch.dtype) -> None:
    """Read a directory and write it again, in files of 20 kB."""
    env = init_all_env(everything_on(num_ranks) if num_ranks > 1 else ModelParallelConfig(), device="cpu")
    loaded = load_huggingface(source, parallel=env.config, group=env.group("tp"))
    save_huggingface(
        loaded.model,
        target,
        family=loaded.family,
        config=loaded.config,
        dtype=dtype,
        group=env.group("tp"),
        max_file_bytes=20_000,
    )
    destroy_all_env()
