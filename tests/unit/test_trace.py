"""What `shiplap trace` makes of what was recorded: lanes, numbers, clocks; and what it refuses."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from shiplap.commands.main import main
from shiplap.config import ModelParallelConfig, RunOptions, TrainConfig, UserError
from shiplap.config.lora import LoraOptions
from shiplap.dist.collectives import Handle
from shiplap.dist.hooks import observing, record_collective, record_gemm, record_primitive
from shiplap.tools.trace.chart import draw
from shiplap.tools.trace.chrome import chrome_trace, in_lanes
from shiplap.tools.trace.clocks import clocks_of
from shiplap.tools.trace.exposure import folded, mean_rows, mean_step, site_exposures, step_exposures
from shiplap.tools.trace.layers import telling_modules
from shiplap.tools.trace.options import TraceConfig, TraceOptions
from shiplap.tools.trace.recorder import Recorder
from shiplap.tools.trace.slices import RankTrace, Slice, host_slices, rank_trace, union_ns
from shiplap.tools.trace.spans import Lane, Place, Span
from shiplap.tools.trace.table import exposure_table
from shiplap.tools.trace.watchers import Finish, Watchers

MS = 1_000_000


class Work:
    """A communication that finishes when it is told to, and may be waited for once only, as Gloo's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_finished = threading.Event()
        self.num_waits = 0
        self._error = error

    def wait(self) -> None:
        self.num_waits += 1
        assert self.num_waits == 1
        self.is_finished.wait()
        if self._error is not None:
            raise self._error


class FinishedAt(Finish):
    """The end of a communication, at a given time."""

    def __init__(self, ns: int) -> None:
        super().__init__(Work())
        self._given_ns = ns

    def wait(self) -> int:
        return self._given_ns


def piece(lane: Lane, begin_ms: float, end_ms: float, what: tuple[str, str, str] = ("", "", "")) -> Slice:
    """A slice of step 3; layer, site and method."""
    layer, site, method = what
    name = " ".join(part for part in what if part)
    begin_ns, end_ns = round(begin_ms * MS), round(end_ms * MS)
    return Slice(lane=lane, name=name, begin_ns=begin_ns, end_ns=end_ns, step=3, layer=layer, site=site, method=method)


def test_a_watched_work_is_waited_for_once_and_ends_when_it_is_finished() -> None:
    watchers, works = Watchers(), [Work(), Work()]
    first, second = (watchers.watch(work) for work in works)
    works[1].is_finished.set()
    assert second.wait() == second.wait()
    works[0].is_finished.set()
    assert first.wait() >= second.wait()
    watchers.close()
    assert [work.num_waits for work in works] == [1, 1]


def test_what_a_communication_fails_with_is_raised_where_it_is_needed() -> None:
    watchers, work = Watchers(), Work(RuntimeError("Connection closed by peer"))
    work.is_finished.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        watchers.watch(work).wait()
    watchers.close()


def test_only_an_observer_hears() -> None:
    def start(x: torch.Tensor, works: Sequence[Work]) -> Handle:
        with record_collective("all-gather", x) as watched:
            pass
        return Handle(x, watched(works))

    def gather(method: str, works: Sequence[Work]) -> torch.Tensor:
        with record_primitive("gather", method):
            started = start(torch.zeros(3), works)
            with record_gemm("forward"):
                pass
            return started.wait()

    def finished() -> list[Work]:
        works = [Work(), Work()]
        for work in works:
            work.is_finished.set()
        return works

    recorder, works = Recorder({"fc1": "column"}, watchers=Watchers()), finished()
    gather("ring", finished())
    with observing(recorder):
        with recorder.module("fc1", "forward"):
            gather("ring", works)
    gather("ring", finished())
    module, communication, product, wait = recorder.spans()
    assert [work.num_waits for work in works] == [1, 1]
    assert (module.name, module.lane) == ("fc1 forward", "layers")
    assert (communication.name, communication.lane, communication.num_bytes) == ("fc1 forward ring", "AG", 12)
    assert (product.name, product.lane) == ("fc1 forward ring", "GEMM")
    assert (wait.name, wait.lane, wait.of) == ("fc1 forward ring", "waiting", communication.number)
    assert module.begin_ns <= communication.begin_ns < communication.end_ns
    assert wait.begin_ns <= wait.end_ns <= max(wait.begin_ns, communication.end_ns)


@pytest.mark.parametrize(
    ("kind", "direction", "primitive", "site"),
    [
        ("column", "forward", "gather", "forward"),
        ("row", "forward", "scatter", "forward"),
        ("column", "recompute", "gather", "recompute"),
        ("column", "backward", "prefetch", "wgrad"),
        ("column", "backward", "gather", "wgrad"),
        ("column", "backward", "scatter", "dgrad"),
        ("row", "backward", "gather", "dgrad"),
        ("column", "backward", "", "backward"),
        (None, "backward", "", "backward"),
        (None, "", "", ""),
    ],
)
def test_sites_are_those_of_the_plan(kind: str, direction: str, primitive: str, site: str) -> None:
    place = Place(layer="fc1", direction=direction, primitive=primitive, method="ring")
    assert place.communication_site(kind) == site  # type: ignore[arg-type]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def test_a_module_that_runs_outside_of_the_models_forward_is_recomputed() -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters())
    recorder = Recorder({}, watchers=None)
    x = torch.zeros(1, 2)
    with telling_modules(model, optimizer, recorder):
        model(x)
        with pytest.raises(TypeError):  # recomputation stops by an exception as soon as it has what is needed
            model.first(None)
        model.second(x)
        optimizer.step()
    model(x)
    names = ["model forward", "first forward", "second forward", "first recompute", "second recompute", "optimizer"]
    assert [span.name for span in recorder.spans()] == names
    assert recorder.scope() == Place()


def test_waiting_ends_with_what_is_waited_for() -> None:
    """However late the waiting thread wakes up; and what was finished before is not waited for."""
    recorder = Recorder({}, watchers=None)
    with recorder.collective("all-gather", 4) as watch:
        (waited,) = watch([Work()])
    communication, wait = recorder.spans()[0], Span(number=1, kind="wait", layer="", site="", lane="waiting", of=0)
    recorder._spans.append(wait)
    recorder._finishes[0] = [FinishedAt(50)]
    assert waited is not None
    for (begin, end), expected in {(20, 70): (20, 50), (20, 40): (20, 40), (60, 65): (60, 60)}.items():
        wait.begin_ns, wait.end_ns = begin, end
        recorder.spans()
        assert (communication.end_ns, wait.begin_ns, wait.end_ns) == (50, *expected)
        assert len(host_slices([wait])) == (begin != expected[1])


def test_overlapping_slices_get_lanes_of_their_own_and_nested_ones_do_not() -> None:
    a, inside, b, c = piece("AG", 0, 4), piece("AG", 1, 2), piece("AG", 3, 6), piece("AG", 4, 5)
    assert in_lanes([b, c, inside, a]) == [[a, inside, c], [b]]
    assert in_lanes([]) == []


def test_steps_take_what_began_in_them_and_modules_of_others_get_a_backward() -> None:
    steps = [Span(number=n, kind="step", layer=f"step {n}", site="", lane="layers") for n in (3, 4)]
    (steps[0].begin_ns, steps[0].end_ns), (steps[1].begin_ns, steps[1].end_ns) = (10, 50), (60, 90)
    parts = [(1, 5, "blocks.9.mlp.fc2"), (10, 14, "head.projection"), (20, 24, "blocks.1.mlp.fc2")]
    parts += [(25, 30, "blocks.1.mlp.fc1"), (31, 33, "blocks.1.mlp_norm"), (40, 41, "blocks.0.mlp.fc2")]
    slices = [
        Slice(lane="layers", name=layer, begin_ns=begin, end_ns=end, layer=layer, site="backward")
        for begin, end, layer in parts
    ]
    trace = rank_trace([*host_slices(steps), *slices], steps, 3)
    found = {(item.name, item.step): (item.begin_ns, item.end_ns) for item in trace.slices}
    assert found == {
        ("step 3", 3): (10, 50),
        ("head.projection", 3): (10, 14),
        ("blocks.1 backward", 3): (20, 33),
        ("blocks.1.mlp backward", 3): (20, 30),
        ("blocks.1.mlp.fc2", 3): (20, 24),
        ("blocks.1.mlp.fc1", 3): (25, 30),
        ("blocks.1.mlp_norm", 3): (31, 33),
        ("blocks.0 backward", 3): (40, 41),
        ("blocks.0.mlp backward", 3): (40, 41),
        ("blocks.0.mlp.fc2", 3): (40, 41),
        ("step 4", 4): (60, 90),
    }
    assert trace.step_ms == {3: 40e-6, 4: 30e-6}
    assert RankTrace.from_text(trace.to_text()) == trace


def two_layers(wait_ms: float) -> RankTrace:
    """Two layers whose communication takes 4 ms each, twice under way at once, the last `wait_ms` of it waited for."""
    slices = [piece("layers", 0, 20, ("model", "forward", ""))]
    for start, layer in ((0, "blocks.0.mlp.fc1"), (10, "blocks.1.mlp.fc1")):
        what = layer, "forward", "ring"
        slices += [
            piece("GEMM", start, start + 3, what),
            piece("AG", start, start + 3, what),
            piece("AG", start + 2, start + 4, what),
            piece("waiting", start + 4 - wait_ms, start + 4, what),
        ]
    slices.append(piece("other comm", 18, 19, ("step", "", "all-reduce")))
    return RankTrace(slices=slices, step_ms={3: 20.0})


def test_exposed_communication_by_site_and_by_step() -> None:
    ranks = [two_layers(1.0), two_layers(2.0)]
    first, second = step_exposures(ranks, {3: 5.5})
    assert (first.step_ms, first.gemm_ms, first.communication_ms, first.exposed_ms) == (20.0, 6.0, 9.0, 2.0)
    assert (second.exposed_ms, second.exposed_percent, second.train_loss) == (4.0, 20.0, 5.5)
    sites = site_exposures(ranks)
    assert [(site.rank, site.layer, site.num_layers) for site in sites] == [
        (0, "blocks.*.mlp.fc1", 2),
        (0, "step", 1),
        (1, "blocks.*.mlp.fc1", 2),
        (1, "step", 1),
    ]
    assert (sites[0].communication_ms, sites[0].exposed_ms, sites[0].num_communications) == (8.0, 2.0, 4)
    rows = mean_rows(sites, num_ranks=2, num_steps=1)
    assert exposure_table(rows, mean_step([first, second])).splitlines() == [
        "layer                 site     method      under way  exposed  hidden  of the step",
        "blocks.*.mlp.fc1 × 2  forward  ring          8.00 ms  3.00 ms    62 %       15.0 %",
        "step                  -        all-reduce    1.00 ms  0.00 ms   100 %        0.0 %",
        "all                                          9.00 ms  3.00 ms    67 %       15.0 %",
    ]


def test_the_picture_is_drawn_with_and_without_communication(tmp_path: Path) -> None:
    ranks = [two_layers(1.0), two_layers(2.0)]
    rows = mean_rows(site_exposures(ranks), num_ranks=2, num_steps=1)
    for name, shown in (("some.png", rows), ("none.png", [])):
        draw(tmp_path / name, shown, step_exposures(ranks, {3: 5.5}), title="Exposed communication")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_trace_file_has_a_process_a_rank_and_named_lanes() -> None:
    content = chrome_trace([two_layers(1.0), two_layers(2.0).moved(-MS)], ["rank 0", "rank 1"], {"clocks": "one"})
    assert json.loads(json.dumps(content)) == content
    events = content["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name for (pid, _), name in named.items() if pid == 1} == {
        "layers", "GEMM", "AG", "AG (2)", "other comm", "waiting",
    }  # fmt: skip
    waits = [e for e in events if e["ph"] == "X" and named[e["pid"], e["tid"]] == "waiting"]
    assert [(e["pid"], e["ts"], e["dur"], e["name"]) for e in waits] == [
        (0, 3000.0, 1000.0, "blocks.0.mlp.fc1 forward ring"),
        (0, 13000.0, 1000.0, "blocks.1.mlp.fc1 forward ring"),
        (1, 3000.0, 2000.0, "blocks.0.mlp.fc1 forward ring"),
        (1, 13000.0, 2000.0, "blocks.1.mlp.fc1 forward ring"),
    ]
    assert waits[0]["args"] == {"step": 3, "layer": "blocks.0.mlp.fc1", "site": "forward", "method": "ring"}


def test_clocks_of_other_hosts_are_moved_and_those_of_one_are_not() -> None:
    one = clocks_of(["a", "a"], [[100, 200, 300], [105, 203, 300]])
    assert (one.offsets_ns, one.num_hosts) == ([0, 0], 1)
    assert one.in_words() == "all ranks run on one host and share its clock"
    two = clocks_of(["a", "b", "b"], [[1000, 2000, 3000], [51000, 52400, 53200], [51001, 52000, 53000]])
    assert (two.offsets_ns, two.num_hosts, two.uncertainty_ns) == ([0, 50200, 50200], 2, 200)
    assert "2 hosts were aligned at a handshake, to about 0 µs" in two.in_words()


def test_layers_are_folded_and_overlapping_time_counts_once() -> None:
    assert [folded(name) for name in ("blocks.11.mlp.fc1", "head.projection", "blocks.3")] == [
        "blocks.*.mlp.fc1", "head.projection", "blocks.*",
    ]  # fmt: skip
    assert union_ns([piece("AG", 5, 6), piece("AG", 0, 3), piece("AG", 1, 2), piece("AG", 2, 4)]) == 5 * MS


def test_a_trace_takes_the_steps_of_the_run_and_does_nothing_else() -> None:
    config = TraceConfig(
        parallel=ModelParallelConfig(tensor_parallel_size=2),
        lora=LoraOptions(lora_rank=2, lora_save_path="adapters"),
        run=RunOptions(save="model", save_interval=5, val_loss_every=1, run_dir="run", seed=7),
    )
    assert config.ignored() == ["--run-dir", "--val-loss-every", "--save", "--lora-save-path"]
    assert config.steps_only() == TrainConfig(
        parallel=config.parallel, lora=LoraOptions(lora_rank=2), run=RunOptions(seed=7)
    )
    assert TraceConfig().ignored() == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--trace-steps 0", ["--trace-steps", "at least 1", "got 0"]),
        ("--trace-warmup 0", ["--trace-warmup", "at least 1", "got 0"]),
        ("--num-iteration 4", ["--trace-warmup 2", "--trace-steps 3", "5 steps", "--num-iteration 4"]),
        ("--trace-dir /dev/null/here", ["--trace-dir /dev/null/here", "cannot write there"]),
        ("--data nowhere.txt", ["nowhere.txt"]),
        ("--pipeline-parallel 2", ["--pipeline-parallel 2"]),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: str,
    named: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("It was a dark and stormy night. " * 99)
    assert main(["trace", "gpt2", "--data", "corpus.txt", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in named), err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_warm_up_is_needed() -> None:
    with pytest.raises(UserError, match="--trace-warmup must be at least 1"):
        TraceOptions(trace_warmup=0)
