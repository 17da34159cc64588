"""`shiplap bench` on ranks: what it times is the real thing, DTensor computes the same, and everything is written."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shiplap import destroy_all_env, init_all_env
from shiplap.config import ModelOptions, ModelParallelConfig, RunOptions, TrainConfig, TransformerConfig
from shiplap.dist import GlobalEnv, collectives
from shiplap.inspection.meta_model import skeleton
from shiplap.overlap.registry import SEQUENTIAL
from shiplap.tools.bench.peers import PEERS, PeerStep, seat
from shiplap.tools.bench.peers.peer import differences
from shiplap.train.setup import resolve_structure
from shiplap.tuning import probe
from shiplap.tuning.alone import without_communication
from shiplap.tuning.candidates import candidates, sequential_plan
from shiplap.tuning.parts import Part, attention_part, block_parts, mlp_part
from shiplap.tuning.probe import Workload
from tests.distributed.ranks import RankPool
from tests.distributed.test_train import command

Ranks = Callable[[int], RankPool]

OVERLAP = ModelParallelConfig(tensor_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
SIZES = TransformerConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=48,
    max_sequence_length=16,
)
SMALL = "--vocab-size 61 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-sequence-length 16"
BENCH = f"{SMALL} --batch-size 2 --sequence-length 15 --tensor-parallel 2 --sequence-parallel --bench-rounds 5"


def parts_of_blocks(family: str, env: GlobalEnv, dtype: str, **model: Any) -> dict[str, Part]:
    options = ModelOptions(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | model)
    config = TrainConfig(parallel=env.config, model=options, run=RunOptions(dtype="float32"))
    sizes, adapters = resolve_structure(family, config)
    bones = skeleton(family, config, model=sizes, adapters=adapters, rank=env.coordinate("tp"))
    return block_parts(bones, 1, Workload(sequence=16, batch=2, dtype=dtype), env)


def all_parts(env: GlobalEnv, dtype: str) -> dict[str, Part]:
    """By name: those from sizes alone, and those of every family's blocks."""
    workload = Workload(sequence=16, batch=2, dtype=dtype)
    parts = {
        "attention": attention_part(SIZES, env.config, workload, env),
        "attention, bias": attention_part(SIZES, env.config, workload, env, bias=True),
        "SwiGLU": mlp_part(SIZES, env.config, workload, env),
        "GELU": mlp_part(SIZES, env.config, workload, env, feed_forward="gelu"),
    }
    cases: dict[str, dict[str, Any]] = {
        "gpt2": {"dropout": 0.1},
        "llama3": {"recompute": "full", "num_key_value_heads": 2},
        "qwen3": {"recompute": "selective", "num_key_value_heads": 2},
        "mixtral": {},
    }
    for family, model in cases.items():
        parts |= {f"{family} {name}": part for name, part in parts_of_blocks(family, env, dtype, **model).items()}
    return parts


def each_plan_computes_the_same(device: str) -> list[str]:
    """On one rank: parts whose gradients are not those of another plan."""
    env, wrong = init_all_env(OVERLAP, device=device), []
    for title, part in all_parts(env, "float32").items():
        part.module.eval()
        part.set({name: sequential_plan(layer) for name, layer in part.layers.items()})
        y, expected = part.run(part.module)
        part.set(
            {name: list(candidates(layer, "forward", OVERLAP).values())[-1] for name, layer in part.layers.items()}
        )
        assert any(linear.plan.forward != SEQUENTIAL for linear in part._linears.values())
        other_y, gradients = part.run(part.module)
        assert len(gradients) == 1 + sum(1 for _ in part.module.parameters())
        assert all(parameter.grad is None for parameter in part.module.parameters())
        pairs = [(other_y, y), *zip(gradients, expected, strict=True)]
        if not all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) for ours, theirs in pairs):
            wrong.append(title)
    destroy_all_env()
    return wrong


def test_a_part_computes_the_same_under_every_plan(ranks: Ranks) -> None:
    assert ranks(2).run(each_plan_computes_the_same, "cpu") == [[], []]


def alone(device: str) -> int:
    """On one rank: run what computes without communication, where communication fails."""
    env, count = init_all_env(OVERLAP, device=device), 0
    for part in all_parts(env, "float32").values():
        module = without_communication(part.module, 2)
        with ExitStack() as nothing:
            for where, what in (
                (collectives, "_all_gather_single"),
                (collectives, "_reduce_scatter_single"),
                (dist, "all_reduce"),
                (dist, "batch_isend_irecv"),
            ):
                nothing.enter_context(patch.object(where, what, side_effect=AssertionError(what)))
            y, gradients = part.run(module)
        assert y.shape == part.x.shape
        assert [gradient.shape for gradient in gradients[1:]] == [p.shape for p in part.module.parameters()]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        # The same memory, and layers that still know their ranks.
        assert all(a is b for a, b in zip(module.parameters(), part.module.parameters(), strict=True))
        assert all(linear.group is env.group("tp") for linear in part._linears.values())
        count += 1
    destroy_all_env()
    return count


def test_products_alone_communicate_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(alone, "cpu") == [16, 16]


class Counting(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.counts[name.removesuffix("_into_tensor").removesuffix("_tensor")] += 1
        return func(*args, **kwargs or {})


def dtensor(device: str, dtype: str) -> dict[str, Any]:
    """On one rank: for each part why DTensor cannot, or how far it is off and what it communicates."""
    env = init_all_env(OVERLAP, device=device)
    found: dict[str, Any] = {}
    for title, part in all_parts(env, dtype).items():
        step = seat(PEERS["dtensor"], part)
        if isinstance(step, str):
            found[title] = step
        else:
            off = max(differences(part, step).values())
            with Counting() as counting:
                y, gradients = step()
            assert y.shape == part.x.shape
            assert len(gradients) == 1 + sum(1 for _ in step.module.parameters())
            assert all(parameter.grad is None for parameter in step.module.parameters())
            found[title] = off, dict(counting.counts)
    destroy_all_env()
    return found


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_dtensor_computes_the_same_with_one_gather_a_part(ranks: Ranks, *, dtype: str, close: float) -> None:
    both = ranks(2).run(dtensor, "cpu", dtype)
    assert both[0] == both[1]
    found = both[0]
    for title in ("mixtral experts", "mixtral block"):
        assert found.pop(title) == "has no simple counterpart of experts"
    for title, (off, counts) in found.items():
        assert off < close, title
        num_parts, is_again = (2 if "block" in title else 1), title == "llama3 block"
        # Forward and backward gather once and scatter once, whatever number of products a gather serves.
        assert counts["all_gather"] == (3 if is_again else 2) * num_parts, title
        # Computing again ends with the last tensor that was kept: before the block's last scatter.
        assert counts["reduce_scatter"] == (5 if is_again else 2 * num_parts), title
        # Gradients of norms, weight and bias, are made whole in the step.
        assert counts.get("all_reduce", 0) == ("block" in title) * (4 if "gpt2" in title else 2), title


class Wrong:
    """Somebody who forgets a factor."""

    title = "wrong"

    def why_not(self, part: Part) -> str | None:
        return None

    def step(self, part: Part) -> PeerStep:
        step = PEERS["dtensor"].step(part)

        class Off:
            module, copies = step.module, step.copies

            def __call__(self) -> Any:
                y, gradients = step()
                return y * 1.001, gradients

        return Off()


def seats() -> list[str]:
    """On one rank: what is said of peers that cannot be compared."""
    env = init_all_env(replace(OVERLAP, tensor_parallel_size=2), device="cpu")
    workload = Workload(sequence=16, batch=2, dtype="float32")
    said = []
    for peer, part in (
        (Wrong(), mlp_part(SIZES, env.config, workload, env)),
        (PEERS["dtensor"], attention_part(replace(SIZES, num_key_value_heads=1), env.config, workload, env)),
    ):
        seated = seat(peer, part)
        said.append(seated if isinstance(seated, str) else "seated")
    destroy_all_env()
    return said


def test_a_peer_that_cannot_or_is_wrong_says_so(ranks: Ranks) -> None:
    wrong, shared = ranks(2).run(seats)[0]
    assert wrong == "computes something else: y is off by 1e-03"
    assert shared == "cannot share key-value heads, which TP 2 does not divide"


def once_each(arguments: str) -> tuple[int, str, str]:
    """On one rank: the command, running everything once however short it is."""
    with patch.object(probe, "_LEAST_MS", 0.0):
        return command([arguments])


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]


def test_everything_is_measured_shown_and_written(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    (code, out, err), other = ranks(2).run(
        once_each, f"bench gpt2 {BENCH} --ffn-hidden-size 64 --tp-comm-overlap --bench-dir {folder}"
    )
    assert code == 0, err
    assert other[:2] == (0, "")
    assert out.endswith(f"\nbench folder: {folder}\n")
    assert max(map(len, out.replace(str(folder), "").splitlines())) <= 120
    assert "(padded to 16)" in out
    records = records_of(folder)
    subjects = {(record["what"], record["name"], record["pass"]): record["count"] for record in records}
    layers = ("blocks.*.attention.qkv", "blocks.*.attention.proj", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2")
    assert subjects == {
        **{("layer", name, direction): 2 for name in layers for direction in ("forward", "backward")},
        **{("layer", "head.projection", direction): 1 for direction in ("forward", "backward")},
        **{("part", name, "forward+backward"): 2 for name in ("attention", "mlp", "block")},
    }
    for what, name, direction in subjects:
        own = [record for record in records if (record["name"], record["pass"]) == (name, direction)]
        roles = {role for record in own for role in record["roles"]}
        assert {"products", "communication", "sequential", "switches", "candidate"} <= roles
        assert what == "layer" or {"fastest methods", "peer"} <= roles
        for record in own:
            assert record["quartile_low_ms"] <= record["median_ms"] <= record["quartile_high_ms"]
            assert 2 <= record["rounds"] <= 5
            assert record["why_not"] is None
    qkv = next(r for r in records if r["name"] == layers[0] and r["variant"] == "ring")
    assert (qkv["message_bytes_per_rank"], qkv["dtype"], qkv["tensor_parallel_size"]) == (2048 * 2 // 2, "float32", 2)
    assert (qkv["device"], qkv["torch_version"], qkv["method"]) == ("cpu", torch.__version__, "ring")
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "bench: 100 %, block × 2 forward+backward: " in err


def test_experts_adapters_and_a_measured_plan(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    arguments = f"{BENCH} --ffn-hidden-size 32 --tp-comm-overlap --dtype bfloat16 --bench-dir {folder}"
    plan = "--tp-comm-plan auto --tp-comm-plan-seconds 1"
    results = ranks(2).run(with_cache, str(tmp_path), f"bench mixtral {arguments} {plan} --json")
    (code, out, err), other = results
    assert code == 0, err
    assert other[:2] == (0, "")
    records = records_of(folder)
    assert [json.loads(line) for line in out.splitlines()] == records
    absent = {record["name"]: record["why_not"] for record in records if record["why_not"] is not None}
    assert absent == dict.fromkeys(("experts", "block"), "has no simple counterpart of experts")
    for name in {record["name"] for record in records}:
        assert any("measured plan" in record["roles"] for record in records if record["name"] == name), name


def with_cache(folder: str, arguments: str) -> tuple[int, str, str]:
    with patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
        return once_each(arguments)


def test_without_overlap_it_says_so_and_adapters_have_no_peer(ranks: Ranks, tmp_path: Path) -> None:
    lora = "--lora-rank 2 --lora-target-modules blocks.1.mlp.fc1"
    arguments = f"bench llama3 {BENCH} --ffn-hidden-size 64 {lora} --bench-dir {tmp_path / 'bench'}"
    code, out, err = ranks(2).run(once_each, arguments)[0]
    assert code == 0, err
    assert "--tp-comm-overlap is off: no method is measured that overlaps anything." in out
    assert "attention of block 0: forward only" in out
    assert "DTensor: no adapters in this comparison" in out


def test_it_starts_its_own_workers(tmp_path: Path) -> None:
    arguments = f"bench gpt2 {BENCH} --ffn-hidden-size 64 --num-layers 1 --bench-peers none".split()
    process = subprocess.run(
        [sys.executable, "-m", "shiplap", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("bench-gpt2-")
    assert process.stdout.endswith(f"\nbench folder: runs/{folder.name}\n")
    assert {path.name for path in folder.iterdir()} == {"bench.jsonl", "bench.png"}
    assert not any("peer" in record["roles"] for record in records_of(folder))


def test_mistakes_are_named_once(ranks: Ranks) -> None:
    results = ranks(2).run(command, [f"bench gpt2 {BENCH} --sequence-length 17"])
    assert [code for code, _, _ in results] == [2, 2]
    assert "--sequence-length 17" in results[0][2]
    assert results[1][2] == ""
