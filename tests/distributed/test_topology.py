"""The environment of several ranks: mesh, groups, agreement, and one rank's mistake ending all."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shiplap import GlobalEnv, destroy_all_env, init_all_env
from shiplap.config import UserError
from shiplap.dist.agreement import AgreedError, check_same_everywhere, fail_together
from tests.cases.topology import ToyConfig
from tests.distributed.ranks import RankPool


def groups() -> dict[str, list[int] | int]:
    env = init_all_env(tensor_parallel_size=2, pipeline_parallel_size=2, device="cpu")
    members: dict[str, list[int] | int] = {}
    for axis in ("tp", "dp", "pp"):
        group = GlobalEnv.instance().group(axis)
        assert group is not None
        members[axis] = dist.get_process_group_ranks(group.process_group)
        total = torch.tensor([env.rank])
        dist.all_reduce(total, group=group.process_group)
        members[f"{axis} sum"] = int(total)
        members[f"{axis} place"] = env.coordinate(axis)
    assert env.mesh is not None
    assert env.mesh.mesh_dim_names == ("pp", "dp", "tp")
    destroy_all_env()
    # Whoever joined torch.distributed keeps it.
    assert dist.is_initialized()
    return members


def test_process_groups_follow_the_layout(ranks: Callable[[int], RankPool]) -> None:
    for rank, members in enumerate(ranks(8).run(groups)):
        tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4
        assert members["tp"] == [rank - tp, rank - tp + 1]
        assert members["dp"] == [rank - 2 * dp, rank - 2 * dp + 2]
        assert members["pp"] == [rank - 4 * pp, rank - 4 * pp + 4]
        assert all(members[f"{axis} sum"] == sum(members[axis]) for axis in ("tp", "dp", "pp"))
        assert [members[f"{axis} place"] for axis in ("tp", "dp", "pp")] == [tp, dp, pp]


def groups_with_another_axis() -> dict[str, list[int]]:
    env = init_all_env(ToyConfig(tensor_parallel_size=2, toy_size=2), device="cpu")
    assert env.mesh is not None
    assert env.mesh.mesh_dim_names == ("pp", "dp", "toy", "tp")
    members = {axis: dist.get_process_group_ranks(group.process_group) for axis, group in env.groups.items()}
    destroy_all_env()
    return members


def test_another_axis_gets_its_groups(ranks: Callable[[int], RankPool]) -> None:
    for rank, members in enumerate(ranks(4).run(groups_with_another_axis)):
        tp, toy = rank % 2, rank // 2
        assert members == {"toy": [tp, tp + 2], "tp": [2 * toy, 2 * toy + 1]}


def world_that_does_not_fit() -> str:
    with pytest.raises(UserError) as refused:
        init_all_env(tensor_parallel_size=3, device="cpu")
    return str(refused.value)


def test_a_world_that_does_not_fit_is_refused_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(world_that_does_not_fit):
        assert "2 ranks" in message
        assert "3 × 1 = 3" in message


def agreed_message(found_here: str | None) -> str:
    with pytest.raises(AgreedError) as agreed, fail_together():  # noqa: PT012 - the mistake is made inside
        if found_here is not None:
            raise UserError(found_here)
    return str(agreed.value)


def one_rank_finds_a_mistake() -> str:
    return agreed_message("--data notes.txt: no such file." if dist.get_rank() == 1 else None)


def test_all_ranks_stop_when_one_finds_a_mistake(ranks: Callable[[int], RankPool]) -> None:
    assert set(ranks(4).run(one_rank_finds_a_mistake)) == {"rank 1: --data notes.txt: no such file."}


def all_find_the_same_mistake() -> str:
    return agreed_message("no data")


def test_a_mistake_that_all_find_is_said_once(ranks: Callable[[int], RankPool]) -> None:
    assert set(ranks(2).run(all_find_the_same_mistake)) == {"no data"}


def started_differently() -> str:
    check_same_everywhere({"learning_rate": 0.1})
    with pytest.raises(AgreedError) as agreed:
        check_same_everywhere({"learning_rate": 0.1, "seed": 1 if dist.get_rank() == 2 else 0})
    return str(agreed.value)


def test_ranks_that_were_started_differently_say_where(ranks: Callable[[int], RankPool]) -> None:
    [message] = set(ranks(4).run(started_differently))
    assert "seed" in message
    assert "ranks 0, 1, 3: 0; rank 2: 1" in message


KEEPS_EVERYTHING = """
import torch
from pathlib import Path
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from shiplap import ColumnParallelLinear, RowParallelLinear, destroy_all_env, init_all_env

env = init_all_env(tensor_parallel_size=2, sequence_parallel=True, device="cpu")
column, row = ColumnParallelLinear(4, 4), RowParallelLinear(4, 4)
optimizer = torch.optim.AdamW([*column.parameters(), *row.parameters()])
y = row(column(torch.ones(2, 4)))
y.sum().backward()
optimizer.step()
z = column(torch.ones(2, 4))
# Its caches keep the mesh for good.
parallel = parallelize_module(torch.nn.Linear(4, 4), env.mesh["tp"], ColwiseParallel(input_layouts=Shard(0)))
parallel(torch.ones(2, 4)).sum().backward()
destroy_all_env()
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
try:
    row(z)
except RuntimeError as error:
    print(f"Gloo threads: {sum('gloo' in name for name in names)}; {error}", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_process_groups_end_although_layers_and_graphs_live_on(tmp_path: Path) -> None:
    """A thread of Gloo's that outlives the interpreter aborts the process now and then."""
    (tmp_path / "keeps.py").write_text(KEEPS_EVERYTHING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "keeps.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"Gloo threads: 0; This process group is gone", done.stdout)) == 2, done.stdout
