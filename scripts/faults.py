#!/usr/bin/env python3
"""Puts small faults into a copy of the sources, one at a time, and sees whether the tests of `make test` find them.

    scripts/faults.py                  # all of them; some minutes
    scripts/faults.py bias norm        # those whose names have one of these words

Of each fault only the test files that should find it are run, up to the first failure. The exit code is 1 if a fault
stays unseen. A fault whose text is no longer in its file is an error: write it anew for the code as it is.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A mistake that someone might make.

    Attributes:
        name: what is wrong then.
        file: below `src/shiplap`.
        right: a text that stands there once.
        wrong: what takes its place.
        tests: the files below `tests` that are run.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


_LINEAR = ("distributed/test_linear.py",)
_MODELS = ("distributed/test_models.py",)
_COMPOSITIONS = ("distributed/test_compositions.py",)
_TRAIN = ("distributed/test_train.py",)
FAULTS = (
    Fault("a communication is not waited for", "dist/collectives.py", "work.wait()", "pass", _LINEAR),
    Fault(
        "the blocks of a fused weight begin in the wrong place",
        "tensor_parallel/placement.py",
        "range(offset + part.start + held, offset + part.stop)",
        "range(part.start + held, part.stop)",
        ("unit/test_placement.py",),
    ),
    Fault("a bias is added twice", "tensor_parallel/function.py", "y_s.add_(bias)", "y_s.add_(2 * bias)", _LINEAR),
    Fault(
        "the gradient of a norm is not summed over the ranks",
        "dist/mappings.py",
        "summed = all_reduce(flat, ctx.group).wait().split",
        "summed = flat.split",
        _MODELS,
    ),
    Fault(
        "heads that ranks share keep each rank's own gradient",
        "tensor_parallel/parameters.py",
        "    all_reduce(shared, group).wait()\n",
        "",
        _MODELS,
    ),
    Fault(
        "what pads the vocabulary gets probability",
        "tensor_parallel/cross_entropy.py",
        'logits.detach()[..., ctx.num_valid :] = float("-inf")',
        "logits.detach()[..., ctx.num_valid :] = 0.0",
        _COMPOSITIONS,
    ),
    Fault(
        "a token of another rank looks up this rank's first row",
        "tensor_parallel/embedding.py",
        ".masked_fill(elsewhere[..., None], 0.0)",
        "",
        _COMPOSITIONS,
    ),
    Fault(
        "a gradient takes the place of what main_grad held",
        "tensor_parallel/wgrad.py",
        "out=self.main_grad, add=True",
        "out=self.main_grad, add=False",
        _LINEAR,
    ),
    Fault(
        "a part of a sum is taken for another rank's",
        "overlap/by_shard.py",
        "parts[source] = Handle(incoming, transfers)",
        "parts[destination] = Handle(incoming, transfers)",
        _LINEAR,
    ),
    Fault(
        "a ring consumes a shard where the one before it belongs",
        "overlap/by_shard.py",
        "consume(rows, x_SBH[rows])\n    return x_SBH\n\n\ndef chunk_bounds",
        "consume(rows, x_SBH[rows].roll(1, 0))\n    return x_SBH\n\n\ndef chunk_bounds",
        _LINEAR,
    ),
    Fault(
        "what all ranks hold counts once for each rank in the gradient's norm",
        "tensor_parallel/placement.py",
        "if axis not in self.splits):\n            return []",
        "if axis not in self.splits):\n            pass",
        _TRAIN,
    ),
    Fault(
        "ranks that hold different tokens drop alike",
        "tensor_parallel/random.py",
        "(seed + rank_in(group) * _STRIDE) % 2**63",
        "seed % 2**63",
        _COMPOSITIONS,
    ),
    Fault(
        "initial weights differ from rank to rank",
        "tensor_parallel/parameters.py",
        "generator.manual_seed(_seed_of(seed,",
        "generator.manual_seed(_seed_of(seed + along_tp(group)[TP].rank,",
        _MODELS,
    ),
    Fault(
        "micro-batches are added up, not averaged",
        "train/step.py",
        "(loss / len(micro_batches)).backward()",
        "loss.backward()",
        _TRAIN,
    ),
    Fault(
        "replicas average all micro-batches but the last",
        "parallel/data.py",
        "and not last:",
        "and last:",
        _TRAIN,
    ),
    Fault(
        "a transposed tensor is read as it stands",
        "checkpoint/load.py",
        "= tensor.t() if where.transposed else tensor",
        "= tensor.reshape(out[start - rows.start : stop - rows.start].shape)",
        ("distributed/test_huggingface.py",),
    ),
    Fault(
        "positions begin at 0 behind what is cached",
        "layers/attention.py",
        "start = 0 if cache is None else cache.length",
        "start = 0",
        ("distributed/test_generation.py",),
    ),
    Fault(
        "gradients are not clipped",
        "optim/clipping.py",
        "if max_norm > 0:",
        "if max_norm < 0:",
        ("unit/test_optim.py",),
    ),
    Fault(
        "a plan that was measured for another layer is taken",
        "tuning/measured.py",
        "if measured.layer == description]",
        'if measured.layer["kind"] == description["kind"]]',
        ("unit/test_plan_fits.py", "distributed/test_tune.py"),
    ),
)


def is_found(fault: Fault, copy: Path) -> bool:
    """Whether a test fails with the fault in."""
    file = copy / "src" / "shiplap" / fault.file
    good = file.read_text()
    if good.count(fault.right) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {fault.right!r} {good.count(fault.right)} times, not once.")
    file.write_text(good.replace(fault.right, fault.wrong))
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    tests = [f"tests/{test}" for test in fault.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    file.write_text(good)
    return done.returncode == 1


def main() -> int:
    """Try the faults; the exit code is 1 if one stays unseen."""
    words = sys.argv[1:]
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="shiplap-faults-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "docs", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
            shutil.copy(ROOT / file, copy / file)
        for fault in FAULTS:
            if not words or any(word in fault.name for word in words):
                begun = time.perf_counter()
                found = is_found(fault, copy)
                unseen += not found
                print(
                    f"{'found ' if found else 'UNSEEN'} {time.perf_counter() - begun:5.0f} s  {fault.name}", flush=True
                )
    return int(unseen > 0)


if __name__ == "__main__":
    sys.exit(main())
