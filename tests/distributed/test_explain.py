"""What is explained is what happens: messages are counted on ranks. And `shiplap train` begins with it."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shiplap import GlobalEnv, destroy_all_env, init_all_env
from shiplap.config import DataOptions, ModelOptions, ModelParallelConfig, RunOptions, TrainConfig
from shiplap.config.lora import LoraOptions
from shiplap.inspection.meta_model import skeleton
from shiplap.inspection.sites import sites_of_run
from shiplap.lora import add_adapters
from shiplap.models.decoder import DecoderModel, build_model
from shiplap.overlap.plan import RowPlan
from shiplap.overlap.primitives import Method
from shiplap.overlap.registry import REPLICATED
from shiplap.parallel import apply_recompute
from shiplap.tensor_parallel import function
from shiplap.tensor_parallel.linear import RowParallelLinear
from shiplap.train import trainer
from shiplap.train.model import make_model
from shiplap.train.setup import Setup, resolve_structure
from shiplap.train.step import computing_in
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]

SMALL = ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=61)
RECOMPUTED = replace(SMALL, recompute="full")
OVERLAP = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
KEPT = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_keep_gathered=True)
LATE = LoraOptions(lora_rank=4, lora_target_modules=("blocks.1.mlp.fc1",))

CASES = {
    "overlap": TrainConfig(parallel=OVERLAP, model=SMALL),
    "no SP": TrainConfig(parallel=ModelParallelConfig(tensor_parallel_size=2), model=SMALL),
    "kept as gathered": TrainConfig(parallel=KEPT, model=SMALL),
    "recomputed": TrainConfig(parallel=OVERLAP, model=RECOMPUTED),
    "adapters from block 1 on": TrainConfig(parallel=OVERLAP, model=SMALL, lora=LATE),
    "adapters from block 1 on, recomputed": TrainConfig(parallel=OVERLAP, model=RECOMPUTED, lora=LATE),
    "bfloat16": TrainConfig(parallel=OVERLAP, model=SMALL, run=RunOptions(dtype="bfloat16")),
}


def messages(family: str, config: TrainConfig, trained: str | None = None) -> tuple[Counter[str], Counter[str]]:
    """Messages and bytes of one micro-batch, by collective; as they happen and as they are explained.

    With `trained`, no other parameter is.
    """
    env = init_all_env(config.parallel, device="cpu")
    sizes, adapters = resolve_structure(family, config)
    group = env.group("tp")
    model = build_model(family, sizes, parallel=config.parallel, group=group, seed=0)
    apply_recompute(model, config.model.recompute)
    if adapters is not None:
        add_adapters(model, adapters, seed=0)
    planned = skeleton(family, config, model=sizes, adapters=adapters)
    for name, parameter in [*model.named_parameters(), *planned.named_parameters()] if trained else []:
        parameter.requires_grad_(name == trained)
    counted: Counter[str] = Counter()

    def count(method: Method, collective: str, whole: torch.Size, like: torch.Tensor) -> None:
        if method == REPLICATED:
            if collective == "all-gather":
                return
            collective = "all-reduce"
        counted[collective] += 1
        counted[f"{collective} bytes"] += whole.numel() * like.itemsize // 2 * (2 if collective == "all-reduce" else 1)

    def counting(name: str) -> Any:
        real = getattr(function, name)

        def call(method: Method, first: Any, *others: Any, **named: Any) -> Any:
            if name == "produce_and_scatter":
                count(method, "reduce-scatter", others[0], named["like"])
            else:
                count(method, "all-gather", torch.Size([2 * first.shape[0], *first.shape[1:]]), first)
            return real(method, first, *others, **named)

        return patch.object(function, name, call)

    tokens = torch.randint(61, (config.data.batch_size, config.data.sequence_length + 1))
    with counting("gather_and_consume"), counting("prefetch"), counting("produce_and_scatter"):
        with computing_in(config.run.dtype, env.device):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    sites = sites_of_run(model, config)
    # What is known before anything starts is what the real model has.
    assert sites == sites_of_run(planned, config)
    explained: Counter[str] = Counter()
    for site in sites:
        if site.messages_per_micro_batch:
            collective = site.communicates.split()[0]
            explained[collective] += site.messages_per_micro_batch * site.num_layers
            explained[f"{collective} bytes"] += site.bytes_per_rank_and_micro_batch
    destroy_all_env()
    return counted, explained


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_explained_happens(ranks: Ranks, family: str, case: str) -> None:
    config = replace(CASES[case], data=DataOptions(batch_size=2, sequence_length=15))
    if family == "mixtral" and config.lora.is_on:  # whose experts cannot be adapted
        config = replace(config, lora=replace(LATE, lora_target_modules=("blocks.1.attention.proj",)))
    for counted, explained in ranks(2).run(messages, family, config):
        assert counted == explained
        assert counted.total() > 0


@pytest.mark.parametrize(
    ("family", "trained"),
    [
        # What a Row layer gathers dy for, if not for dgrad.
        ("gpt2", "blocks.1.attention.proj.weight"),
        ("gpt2", "blocks.1.attention.proj.bias"),
        # Modules that stand before a Column layer, and act after it.
        ("qwen3", "blocks.1.attention.query_norm.weight"),
        ("mixtral", "blocks.1.mlp.router.weight"),
        ("gpt2", "final_norm.weight"),
    ],
)
def test_what_is_explained_happens_with_one_parameter_trained(ranks: Ranks, family: str, trained: str) -> None:
    for counted, explained in ranks(2).run(messages, family, CASES["overlap"], trained):
        assert counted == explained


TRAIN = (
    "train gpt2 --vocab-size 257 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--max-sequence-length 32 --sequence-length 16 --batch-size 2 --num-iteration 1 --tensor-parallel 2"
)


def write_corpus(folder: Path) -> Path:
    path = folder / "corpus.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    return path


def test_training_begins_with_the_table(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    flags = "--sequence-parallel --tp-comm-overlap --tp-comm-strict --tp-comm-overlap-disable-qkv"
    results = ranks(2).run(command, [f"{TRAIN} {flags} --data {corpus} --run-dir {tmp_path}/run"])
    assert [code for code, _, _ in results] == [0, 0], results
    out = results[0][1]
    table, steps = out.split("run folder:", 1)
    disabled = r"sequential +2\.0 KiB +--tp-comm-overlap-disable-qkv is on"
    assert re.search(rf"blocks\.\*\.attention\.qkv × 2 +forward +all-gather x +{disabled}", table)
    assert re.search(r"blocks\.\*\.mlp\.fc2 × 2 +forward +reduce-scatter y +p2p +2\.0 KiB +the forward pr", table)
    assert table.count("KiB") == 13
    assert "step 1/1" in steps


def command_with_a_replaced_plan(arguments: list[str]) -> tuple[int, str, str]:
    """As `command`, FC2 of block 1 being given a plan before training."""

    def made(setup: Setup, env: GlobalEnv) -> DecoderModel:
        model = make_model(setup, env)
        fc2 = model.get_submodule("blocks.1.mlp.fc2")
        assert isinstance(fc2, RowParallelLinear)
        fc2.plan = RowPlan(forward="p2p:2", dgrad="sequential")
        return model

    with patch.object(trainer, "make_model", made):
        return command(arguments)


def test_the_table_in_training_shows_a_replaced_plan(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    flags = f"--sequence-parallel --tp-comm-overlap --data {corpus} --run-dir {tmp_path}/run"
    [(code, out, _), _] = ranks(2).run(command_with_a_replaced_plan, [f"{TRAIN} {flags}"])
    assert code == 0
    assert re.search(r"\nblocks\.0\.mlp\.fc2 +forward .* p2p +2\.0 KiB +the forward product\n", out)
    assert re.search(r"\nblocks\.1\.mlp\.fc2 +forward .* p2p:2 +2\.0 KiB +the forward product, plan replaced\n", out)
    assert re.search(r" dgrad +all-gather dy +sequential +2\.0 KiB +plan replaced: the switches say ring\n", out)


def test_strictness_stops_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"--tp-comm-overlap-rs-dgrad --tp-comm-strict --data nowhere --run-dir {tmp_path}/run"
    results = ranks(2).run(command, [f"{TRAIN} {flags}"])
    assert [code for code, _, _ in results] == [2, 2]
    assert "--tp-comm-overlap-rs-dgrad acts nowhere" in results[0][2]
    assert results[1][2] == ""
    assert not (tmp_path / "run").exists()
