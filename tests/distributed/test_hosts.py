"""`scripts/hosts.py`: its hosts talk, its links are slow, and whatever happens it leaves nothing behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripts import hosts

SCRIPT = Path(__file__).parents[2] / "scripts" / "hosts.py"
LONGEST_SECONDS = 60  # after which a run that hangs is killed; no passing test takes as long

pytestmark = pytest.mark.hosts

LACK = hosts.missing_requirement()
needs_namespaces = pytest.mark.skipif(LACK is not None, reason=str(LACK))

# Each rank starts a process outside its session, prints the pids of both, and waits for a signal. It prints in one
# write, since `print` makes several where output is unbuffered, and the other rank's line may come between.
STAY = """
import os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
sys.stdout.write(f"pids {os.getpid()} {child.pid}\\n")
signal.pause()
"""


def command_line(program: str, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *options, "--", sys.executable, "-c", program]


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = command_line(program, *options)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)


@contextmanager
def background(program: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose output, all of it in stdout, the test reads as it comes."""
    # What a shell's background job is told to ignore, it would pass on.
    arguments = ["env", "--default-signal=HUP,INT,TERM", *command_line(program, *options)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(LONGEST_SECONDS, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def read_until(process: subprocess.Popen[str], word: str, times: int = 1) -> list[str]:
    """The lines with the word, once there are so many."""
    assert process.stdout
    found = []
    for line in process.stdout:
        if word in line:
            found.append(line)
        if len(found) == times:
            break
    assert len(found) == times, f"{word!r} came {len(found)} times before the end, not {times}"
    return found


def read_pids(process: subprocess.Popen[str], ranks: int = 2) -> list[int]:
    """The pids that the ranks of a run of `STAY` print."""
    lines = read_until(process, "pids", ranks)
    return [int(pid) for line in lines for pid in line.split("pids")[1].split()]


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^shiplap-{pid}-\w+", listed, re.MULTILINE)


def alive(pids: list[int]) -> list[int]:
    """Those that run; a zombie that nobody collects does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found.append(pid)
    return found


@needs_namespaces
@pytest.mark.parametrize("number", [2, 4])
def test_gloo_adds_up_across_hosts(number: int) -> None:
    program = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print("sum", x.tolist())
dist.destroy_process_group()
"""
    result = run(program, "--hosts", str(number))
    assert result.returncode == 0, result.stderr
    total = float(sum(range(1, number + 1)))
    assert result.stdout == f"sum {[total] * 3}\n"
    for host in range(1, number):
        assert f"[host {host}] sum {[total] * 3}\n" in result.stderr


@needs_namespaces
def test_ranks_of_a_host_share_its_namespace() -> None:
    program = """
import os
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LINK_RATE_BITS"
print(*(os.environ[name] for name in names), os.stat("/proc/self/ns/net").st_ino)
"""
    result = run(program, "--ranks-per-host", "2", "--rate", "2.5gbit")
    assert result.returncode == 0, result.stderr
    lines = [result.stdout.strip(), *sorted(result.stderr.splitlines())]
    variables, inodes = zip(*(line.rsplit(maxsplit=1) for line in lines), strict=True)
    assert variables == (
        "0 4 0 2 2500000000",
        "[host 0 rank 1] 1 4 1 2 2500000000",
        "[host 1 rank 2] 2 4 0 2 2500000000",
        "[host 1 rank 3] 3 4 1 2 2500000000",
    )
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


@needs_namespaces
def test_the_link_is_no_faster_than_its_rate() -> None:
    size = 4_000_000
    program = f"""
import os, socket, time
address = os.environ["MASTER_ADDR"], 30000
if os.environ["RANK"] == "0":
    link = socket.create_server(address).accept()[0]
else:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
for sender in "01":
    if os.environ["RANK"] == sender:
        link.recv(1)
        link.sendall(bytes({size}))
    else:
        start = time.perf_counter()
        link.sendall(b"?")
        left = {size}
        while left:
            left -= len(link.recv(min(left, 1 << 20)))
        print("seconds", time.perf_counter() - start)
"""
    result = run(program, "--rate", "100mbit")
    assert result.returncode == 0, result.stderr
    seconds = [float(text) for text in re.findall(r"seconds (\S+)", result.stdout + result.stderr)]
    assert len(seconds) == 2  # one each way
    # 80 %: a lower bound on purpose, so that a busy machine cannot fail it; an unlimited link takes 1 %.
    assert min(seconds) >= 0.8 * size * 8 / 100e6


@needs_namespaces
@pytest.mark.parametrize("failing", [0, 1])
def test_one_failure_ends_all(failing: int, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # the failing rank waits here until the other one runs
    program = f"""
import os, sys
if os.environ["RANK"] == "{failing}":
    open({str(pipe)!r}).read()
    sys.exit(7)
{STAY.replace("signal.pause()", f"open({str(pipe)!r}, 'w').close(); signal.pause()")}
"""
    with background(program) as process:
        pids = read_pids(process, ranks=1)
        read_until(process, f"hosts.py: host {failing} failed with exit code 7")
        assert process.wait() == 7
    assert not alive(pids)
    assert not namespaces(process.pid)


@needs_namespaces
def test_a_rank_that_a_signal_ended_counts_as_failed() -> None:
    result = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert result.returncode == 128 + signal.SIGKILL


@needs_namespaces
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(signum: signal.Signals) -> None:
    with background(STAY) as process:
        pids = read_pids(process)
        assert len(namespaces(process.pid)) == 3
        assert len(alive(pids)) == 4
        process.send_signal(signum)
        assert process.wait() == 128 + signum
    assert not alive(pids)
    assert not namespaces(process.pid)


@needs_namespaces
def test_who_refuses_sigterm_is_killed() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.stdout.write("refused\\n"))
sys.stdout.write(f"pids {os.getpid()}\\n")
while True:
    signal.pause()
"""
    with background(program) as process:
        pids = read_pids(process)
        process.terminate()
        read_until(process, "refused", times=2)
        process.send_signal(signal.SIGINT)  # else it would be killed all the same, 5 s later
        assert process.wait() == 128 + signal.SIGTERM
    assert not alive(pids)
    assert not namespaces(process.pid)


@needs_namespaces
def test_the_next_run_removes_what_a_killed_one_left_and_no_more() -> None:
    with background(STAY) as living, background(STAY) as killed:
        living_pids, killed_pids = read_pids(living), read_pids(killed)
        killed.kill()
        killed.wait()
        assert len(namespaces(killed.pid)) == 3
        assert run("pass").returncode == 0
        assert not alive(killed_pids)
        assert not namespaces(killed.pid)
        assert len(alive(living_pids)) == 4
        assert len(namespaces(living.pid)) == 3
        living.terminate()
        living.wait()
    assert not namespaces(living.pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "--", "true"], "argument --rate: .*'fast'"),
        (["--rate", "0gbit", "--", "true"], "argument --rate: .*'0gbit'"),
        (["--hosts", "1", "--", "true"], "--hosts must be from 2 to 254, got 1"),
        (["--hosts", "255", "--", "true"], "--hosts must be from 2 to 254, got 255"),
        (["--hosts", "two", "--", "true"], "argument --hosts: .*'two'"),
        (["--ranks-per-host", "0", "--", "true"], "--ranks-per-host must be at least 1, got 0"),
        (["--hosts", "2", "--"], "a command must follow --, got none"),
        (["--hosts", "2", "true"], "unrecognized arguments: true"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        hosts.main(arguments)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_without_the_tools_it_names_their_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert hosts.main(["--", "true"]) == 2
    assert "ip and tc not found; on Debian the package is iproute2" in capsys.readouterr().err


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.main(["--", "true"]) == 2
    assert "need root (user id 0), and this is user id 1000" in capsys.readouterr().err
