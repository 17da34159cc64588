"""What the pages say can be done, is done."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shiplap.checkpoint.sizes import sizes_of_run
from shiplap.commands.options import parse_config
from shiplap.config import TrainConfig
from shiplap.config.parallel import ModelParallelConfig
from tests.distributed.ranks import RankPool, shiplap
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands

TRAIN = [c for c in [*commands("bash"), *commands("console")] if "shiplap train" in c]
# A block's commands run one after the other in one folder: later ones use what earlier ones made.
RUN = [block for block in blocks("bash") if any(c.startswith("shiplap ") for c in block.commands())]

SAYS = {
    "train": "run folder",
    "generate": "def ",
    "convert": "written",
    "explain": "overlap with a product",
    "verify": "PASS: ",
    "tune": "plan written: ",
    "bench": "bench folder",
    "trace": "https://ui.perfetto.dev",
}


def run(arguments: list[str], folder: Path, timeout: float = 300) -> str:
    """Run a program as a user without a launcher would; its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(RUN) >= 5
    assert len(TRAIN) > len(RUN)


@pytest.mark.parametrize("command", TRAIN)
def test_train_commands_have_flags_that_exist(command: str) -> None:
    family, *flags = shlex.split(command.split("shiplap train ", 1)[1])
    config = parse_config(TrainConfig, flags, prog="shiplap train", description="Train a model.")
    if config.model.hf_checkpoint is None:  # it is made by a command before
        sizes_of_run(config.model, family).check_divisible_by(config.parallel.tensor_parallel_size)


def ranks_of(arguments: list[str]) -> int:
    """How many ranks a command would start."""
    if arguments[0] in ("explain", "convert") or "--tensor-parallel" not in arguments:
        return 1
    return int(arguments[arguments.index("--tensor-parallel") + 1])


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page}: {block.commands()[0]}")
def test_bash_blocks_run(ranks: Callable[[int], RankPool], block: Block, tmp_path: Path) -> None:
    """On ranks that are there already; that `shiplap` starts them by itself is seen elsewhere."""
    for command in block.commands():
        program, *arguments = shlex.split(command)
        if program == "shiplap":
            (code, output, errors), *_ = ranks(ranks_of(arguments)).run(shiplap, arguments, tmp_path)
            assert code == 0, output[-2000:] + errors[-2000:]
            assert SAYS[arguments[0]] in output, output


def test_the_demo_runs(tmp_path: Path) -> None:
    """The command of `make demo`, for two steps."""
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = recipe[recipe.index("shiplap train") :].replace("\\\n", " ").splitlines()[0]
    output = run([sys.executable, "-m", *shlex.split(command), "--num-iteration", "2"], tmp_path)
    assert "TP 2" in output
    assert "step 2/2 | train loss" in output


@pytest.mark.parametrize("command", [c for c in commands("bash") if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, check=True)


def test_the_layers_script_runs_on_two_ranks(tmp_path: Path) -> None:
    [script] = [block.text for block in blocks("python") if block.page == "tensor_parallel.md"]
    [command] = [c for c in commands("bash") if c.startswith("torchrun ")]
    (tmp_path / "layers.py").write_text(script)
    output = run([sys.executable, "-m", "torch.distributed.run", *command.split()[1:]], tmp_path)
    assert output.count("(16, 2, 64), plan ColumnPlan(forward=ring") == 2


def test_the_readme_layers_run_on_two_ranks(tmp_path: Path) -> None:
    [snippet] = [block.text for block in blocks("python") if block.page == "README.md"]
    (tmp_path / "layers.py").write_text(
        f"import torch\nx = torch.randn(2, 3, 1024)\n{snippet}\nassert y.shape == (2, 3, 1024)\n"
        "from shiplap import destroy_all_env\ndestroy_all_env()\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "layers.py"]
    run([sys.executable, *launch], tmp_path)


def test_the_adapters_snippet_runs(tmp_path: Path) -> None:
    [snippet] = [block.text for block in blocks("python") if block.page == "finetuning.md"]
    (tmp_path / "adapt.py").write_text(
        "from shiplap import ModelParallelConfig\n"
        "from shiplap.families import preset\n"
        "from shiplap.models.decoder import build_model\n"
        'config = preset("llama3", "llama3-debug")\n'
        'model = build_model("llama3", config, parallel=ModelParallelConfig(), group=None, seed=0)\n'
        f"{snippet}"
        'print({name.split(".")[-1] for name, p in model.named_parameters() if p.requires_grad} == {"down", "up"})\n'
    )
    assert run([sys.executable, "adapt.py"], tmp_path) == "True\n"


def test_the_readme_lists_every_overlap_option() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in vars(ModelParallelConfig()):
        if name.startswith("tp_comm"):
            assert f"`--{name.replace('_', '-')}`" in readme, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        # Nobody else's pages: a test needs no network.
        assert "://" in target or (page.parent / target).exists(), target
