#!/usr/bin/env python3
"""Records losses and gradient norms of short deterministic runs, or compares them with a record.

    scripts/losses.py record before.json
    scripts/losses.py compare before.json              # to the bit
    scripts/losses.py compare before.json --within 1e-6
    scripts/losses.py layouts --within 1e-6            # TP 1, 2 and 4 of this checkout against each other

Every family runs on one rank, with TP 2 + SP + overlap, with TP 2 × DP 2, and with adapters. Numbers are hexadecimal
floats. They repeat on one machine only, so records are not kept in the repository.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FAMILIES = ("gpt2", "llama3", "qwen3", "mixtral")
_OVERLAP = ("--tensor-parallel", "2", "--sequence-parallel", "--tp-comm-overlap")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "TP 2 + SP + overlap": _OVERLAP,
    "TP 2 × DP 2": ("--tensor-parallel", "2", "--nproc", "4"),
    "TP 2 + SP + overlap + LoRA": (*_OVERLAP, "--lora-rank", "4"),
}
TP_SIZES: dict[str, tuple[str, ...]] = {
    "TP 1": (),
    "TP 2": ("--tensor-parallel", "2", "--sequence-parallel"),
    "TP 4": ("--tensor-parallel", "4", "--sequence-parallel"),
}
_RUN = (
    "--num-layers", "2", "--batch-size", "4", "--sequence-length", "64", "--num-iteration", "10", "--warmup-iteration",
    "2", "--deterministic",
)  # fmt: skip
Curve = list[tuple[float, float]]


def curve(family: str, layout: tuple[str, ...]) -> Curve:
    """Loss and gradient norm of each step."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "shiplap", "train", family, *_RUN, *layout, "--run-dir", f"{folder}/run"]
        done = subprocess.run(run, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(run)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [(step["train_loss"], step["grad_norm"]) for step in map(json.loads, lines) if "train_loss" in step]


def curves(layouts: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str, Curve]]:
    """Of every family in every layout."""
    for family in FAMILIES:
        for name, layout in layouts.items():
            yield family, name, curve(family, layout)


def difference(one: Curve, other: Curve) -> float:
    """The largest relative difference of two numbers at the same place."""
    assert len(one) == len(other)
    return max(
        abs(a - b) / abs(b) for own, theirs in zip(one, other, strict=True) for a, b in zip(own, theirs, strict=True)
    )


def main() -> int:
    """Record or compare; the exit code is 1 where something differs by more than was allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare", "layouts"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--within", type=float, default=0.0, help="largest relative difference; default: 0, to the bit")
    options = parser.parse_args()
    if (options.file is None) != (options.what == "layouts"):
        parser.error("record and compare take a file, layouts none")
    if options.what == "record":
        record = {
            f"{family}, {name}": [[x.hex() for x in step] for step in run] for family, name, run in curves(LAYOUTS)
        }
        options.file.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    known: dict[str, Curve] = {}
    if options.what == "compare":
        content = json.loads(options.file.read_text())
        known = {key: [(float.fromhex(a), float.fromhex(b)) for a, b in run] for key, run in content.items()}
    worst = 0.0
    for family, name, run in curves(LAYOUTS if options.what == "compare" else TP_SIZES):
        key = f"{family}, {name}"
        off = difference(run, known[key] if options.what == "compare" else known.setdefault(family, run))
        worst = max(worst, off)
        print(f"{key:<40} loss {run[0][0]:.6f} → {run[-1][0]:.6f}   off by {off:.1e}", flush=True)
    return int(worst > options.within)


if __name__ == "__main__":
    sys.exit(main())
