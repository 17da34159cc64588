#!/usr/bin/env python3
"""Runs a command on several "hosts" of this one machine, joined by links of a chosen speed. Linux, as root.

    scripts/hosts.py --hosts 2 --rate 1gbit -- python -m shiplap bench

Each host is a network namespace; its cable to the switch (a bridge, in a namespace of its own) carries RATE each
way. Waiting for such a link costs no processor time, so communication, and what hides it, can be measured on one
machine. Nothing outside the namespaces is changed, and they are gone when the script ends, however it ends; what
a SIGKILL leaves behind, the next run removes.

With --offload the kernel hands on segments of four frames, as to a network card that cuts them itself: cables then cost
a fraction of the processor time, as on real hosts, but a message of up to 36 kB after a pause passes at once.

The command runs once per rank, and finds in its environment
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT   for torch.distributed's env://
  GLOO_SOCKET_IFNAME                       the cable; ranks of one host reach each other past it, at full speed
  LINK_RATE_BITS                           RATE in bit/s
  OMP_NUM_THREADS=1, PYTHONUNBUFFERED=1    unless they are set already
(Torch's warning that a hostname cannot be retrieved is harmless: no name server can be reached in there.)

Rank 0 writes to this script's own stdout and stderr. The lines of all other ranks, from both, go to stderr behind
"[host 1] " ("[host 1 rank 3] " with several ranks a host). Input is empty for all.

The first command that fails ends the others: SIGTERM, then SIGKILL after 5 s or at a second Ctrl-C. Its exit code
is the script's; 128 + n where signal n ended it, or the script. Code 2 is also the script's own: it could not make
the hosts, and says why.
"""

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps its names
OWN_NAME = re.compile(r"shiplap-(\d+)-(?:switch|host\d+)")  # the number is the pid of the script that made it
NETWORK, MOST_HOSTS = "198.18.0", 254  # from RFC 2544's range for measuring network devices, which nobody routes

# Measured 2026-11-30 (2 cores, Linux 6.18): one TCP stream carries 99.4, 99.3, 99.3 and 99.0 % of 100 and 200 mbit,
# 1 and 10 gbit as payload; at load 7, 10 gbit fell to 93-99 % and 1 gbit to 96-99 %. A message of 10 kB to 4 MB
# takes 1.01 times its size / rate; at 10 gbit only from 1 MB up (0.1 MB 0.8 to 1.4 times; 10 kB 6 times: latency).
HEADER_BYTES = 200  # of Ethernet, IP and TCP with options, and to spare
MTU = 9000  # jumbo frames, as clusters use; with 1500, headers take 4 %, and 10 gbit was not reached
# What may pass at once: two frames at least, since tbf drops a frame larger than this; and what the link carries
# while the kernel's timer is late, or it falls short of its rate. More lets short messages through too fast.
BURST_FRAMES, BURST_SECONDS = 2, 200e-6
# Without a card that segments by itself, the processor handles every frame: a transfer of 1 MB took 8 ms of a product
# that ran beside it, at 354 mbit. Segments of four frames take 1 to 2 ms (2026-11-30, benchmarks' log of experiments).
OFFLOAD_FRAMES = 4
QUEUE_BYTES, QUEUE_SECONDS = 1 << 20, 0.05  # the larger one counts; two hosts lost no packet
CONGESTION_CONTROL = "reno"  # in every kernel, and steady here; bbr moved between 68 and 98 % of 10 gbit

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL; assumption: time for last words, not for a checkpoint
KILL_SECONDS = 5.0  # for SIGKILL to work; it cannot on a process that waits for a broken device
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # from <linux/capability.h>
LIBC = ctypes.CDLL(None)

Rank = subprocess.Popen[bytes]


def main(argv: Sequence[str]) -> int:
    """Makes the hosts, runs the command on them, removes them, and returns the exit code."""
    options = parse_arguments(argv)
    if lack := missing_requirement():
        return complain(lack)
    # Held back from here on, and taken only where the script waits: nothing is left half made or half removed.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*stop_signals(), signal.SIGCHLD})
    prefix = f"shiplap-{os.getpid()}"
    switch, hosts = f"{prefix}-switch", [f"{prefix}-host{number}" for number in range(options.hosts)]
    ranks: list[Rank] = []
    printers: list[threading.Thread] = []
    try:
        remove_leftovers()
        connect(switch, hosts, options.rate, frames=OFFLOAD_FRAMES if options.offload else None)
        for rank in range(options.hosts * options.ranks_per_host):
            ranks.append(start(options, hosts, rank, former_mask))
        printers = start_printers(options, ranks)
        return wait(options, ranks)
    except subprocess.CalledProcessError as error:
        return complain(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    finally:
        end_processes(hosts, ranks, GRACE_SECONDS)
        remove_namespaces([*hosts, switch])
        for printer in printers:  # last, since it may wait for whoever reads our stderr
            printer.join()


def parse_rate(text: str) -> int:
    """The bits per second in a rate such as `100mbit` or `2.5gbit`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
    if not match or (bits := round(float(match[1]) * {"mbit": 1e6, "gbit": 1e9}[match[2]])) < 1e6:
        raise argparse.ArgumentTypeError(f"needs 1mbit or more, such as 100mbit or 2.5gbit, got {text!r}")
    return bits


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options before the first `--`, and what follows it as `command`. Exits with 2 where one is wrong."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--hosts N] [--ranks-per-host K] [--rate RATE] [--offload] -- COMMAND [ARG ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="K", help="default: 1")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="in mbit or gbit; default: 1gbit")
    parser.add_argument("--offload", action="store_true", help="large segments, as from a network card that cuts them")
    options = parser.parse_args(argv[:end])
    options.command = argv[end + 1 :]
    if not 2 <= options.hosts <= MOST_HOSTS:
        parser.error(f"--hosts must be from 2 to {MOST_HOSTS}, got {options.hosts}")
    if options.ranks_per_host < 1:
        parser.error(f"--ranks-per-host must be at least 1, got {options.ranks_per_host}")
    if not options.command:
        parser.error("a command must follow --, got none")
    return options


def missing_requirement() -> str | None:
    """What this machine or user lacks, in words; None where it lacks nothing."""
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not found; on Debian the package is iproute2"
    if os.geteuid() != 0:
        return f"network namespaces need root (user id 0), and this is user id {os.geteuid()}"
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if lacking := [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]:
        return f"root lacks {' and '.join(lacking)} here; a container has to be started with --cap-add"
    return None


def connect(switch: str, hosts: Sequence[str], rate: int, *, frames: int | None) -> None:
    """Makes the namespaces, and from each host to the switch a cable that carries `rate` bit/s each way.

    `frames` is how many travel as one segment; None: the kernel cuts segments into frames.
    """
    burst = round(max((frames or BURST_FRAMES) * MTU, BURST_SECONDS * rate / 8))
    queue = round(max(QUEUE_BYTES, QUEUE_SECONDS * rate / 8))
    shape = f"root tbf rate {rate}bit burst {burst} limit {queue}"
    call("ip netns add", switch)
    call("ip -n", switch, "link add switch type bridge")
    call("ip -n", switch, "link set switch up")
    for number, host in enumerate(hosts):
        call("ip netns add", host)
        # Both ends are born where they belong: the machine's own namespace never sees them.
        ends = f"mtu {MTU} type veth peer name eth0 mtu {MTU} netns"
        call("ip -n", switch, f"link add port{number} {ends}", host)
        for namespace, device in ((switch, f"port{number}"), (host, "eth0")):
            # No IPv6: nobody uses it here, and the kernel would send its own packets.
            call("ip -n", namespace, f"link set {device} addrgenmode none")
            if frames is not None:
                # Below the burst, headers included: tbf cuts what is larger.
                largest = frames * MTU - HEADER_BYTES
                call("ip -n", namespace, f"link set {device} gso_max_size {largest} gro_max_size {largest}")
            call("tc -n", namespace, f"qdisc add dev {device} {shape}")
        call("ip -n", switch, f"link set port{number} master switch up")
        call("ip -n", host, "link set lo up")
        call("ip -n", host, "link set eth0 up")
        call("ip -n", host, f"address add {NETWORK}.{number + 1}/24 dev eth0")
        call("ip -n", host, f"route replace {NETWORK}.0/24 dev eth0 congctl {CONGESTION_CONTROL}")


def call(*words: str) -> None:
    """Runs a tool with these words (phrases are split at spaces); its failure carries what it said."""
    subprocess.run(" ".join(words).split(), check=True, capture_output=True, text=True)


def environment(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """This process's environment with what a rank adds to it."""
    own = {
        "RANK": rank,
        "WORLD_SIZE": options.hosts * options.ranks_per_host,
        "LOCAL_RANK": rank % options.ranks_per_host,
        "LOCAL_WORLD_SIZE": options.ranks_per_host,
        "MASTER_ADDR": f"{NETWORK}.1",
        "MASTER_PORT": 29500,  # any would do: a new namespace has every port free
        "GLOO_SOCKET_IFNAME": "eth0",
        "LINK_RATE_BITS": options.rate,
    }
    unless_set = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**unless_set, **os.environ, **{name: str(value) for name, value in own.items()}}


def start(options: argparse.Namespace, hosts: Sequence[str], rank: int, mask: Iterable[int]) -> Rank:
    """Starts one rank, with the signal mask that this script was started with."""

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # when the script is SIGKILLed, nobody else ends its ranks

    return Rank(
        ["ip", "netns", "exec", hosts[rank // options.ranks_per_host], *options.command],
        env=environment(options, rank),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank else None,
        stderr=subprocess.STDOUT if rank else None,
        start_new_session=True,  # Ctrl-C reaches the script, and the script its ranks
        preexec_fn=before_exec,  # safe: this process has no threads until all ranks have started
    )


def label(options: argparse.Namespace, rank: int) -> str:
    """How messages call a rank."""
    host = f"host {rank // options.ranks_per_host}"
    return host if options.ranks_per_host == 1 else f"{host} rank {rank}"


def start_printers(options: argparse.Namespace, ranks: Sequence[Rank]) -> list[threading.Thread]:
    """Starts for each rank but 0 a thread that prints the rank's lines to stderr as they come."""

    def print_lines(lines: IO[bytes], prefix: str) -> None:
        with lines, contextlib.suppress(BrokenPipeError):  # nobody reads stderr any more: then neither do we
            for line in lines:
                sys.stderr.buffer.write(f"[{prefix}] ".encode() + line.removesuffix(b"\n") + b"\n")
                sys.stderr.buffer.flush()

    jobs = [(process.stdout, label(options, rank)) for rank, process in enumerate(ranks) if process.stdout]
    threads = [threading.Thread(target=print_lines, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    return threads


def wait(options: argparse.Namespace, ranks: Sequence[Rank]) -> int:
    """Waits for all ranks, the first failure or a stop signal; returns the exit code that it means."""
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                code = code if code > 0 else 128 - code
                return complain(f"{label(options, rank)} failed with exit code {code}; ending the others", code)
        if None not in codes:
            return 0
        signum = signal.sigwait({*stop_signals(), signal.SIGCHLD})
        if signum != signal.SIGCHLD:
            return complain(f"{signal.Signals(signum).name}; ending all hosts", 128 + signum)


def stop_signals() -> set[signal.Signals]:
    """The signals that end a run: not SIGHUP under nohup."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - ignored


def end_processes(namespaces: Sequence[str], ranks: Sequence[Rank], grace: float) -> None:
    """Ends the ranks and all that runs in the namespaces: SIGTERM, after `grace` seconds or at Ctrl-C SIGKILL."""

    def send(signum: int) -> set[int]:
        # The ranks as well: one that has only just started is not in its namespace yet.
        pids = processes_in(namespaces) | {process.pid for process in ranks if process.poll() is None}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return pids

    left = send(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline and not signal.sigtimedwait({signal.SIGINT}, POLL_SECONDS):
        left = send(0)  # which only asks who is there
    deadline = time.monotonic() + KILL_SECONDS
    while (left := send(signal.SIGKILL)) and time.monotonic() < deadline:  # some may fork as we look
        time.sleep(POLL_SECONDS)
    if left:
        complain(f"these processes could not be killed: {sorted(left)}")


def processes_in(namespaces: Iterable[str]) -> set[int]:
    """The pids of all processes in these namespaces, also of those that left their parent and its session."""
    wanted = {identity(NAMESPACES / name) for name in namespaces} - {None}
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if identity(path / "ns/net") in wanted}


def identity(namespace: Path) -> tuple[int, int] | None:
    """What two paths to the same namespace have in common; None where there is none (any more)."""
    with contextlib.suppress(OSError):
        status = namespace.stat()
        return status.st_dev, status.st_ino
    return None


def remove_leftovers() -> None:
    """Removes what runs that were SIGKILLed have left. A reused pid only delays that until it is free again."""
    found = [match for path in NAMESPACES.glob("*") if (match := OWN_NAME.fullmatch(path.name))]
    dead = [match[0] for match in found if match[1] == str(os.getpid()) or not Path("/proc", match[1]).exists()]
    end_processes(dead, [], grace=0)
    remove_namespaces(dead)


def remove_namespaces(names: Iterable[str]) -> None:
    """Removes the namespaces that exist, and with them all that is in them; two runs may do so at once."""
    for name in names:
        if (NAMESPACES / name).exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def complain(message: str, code: int = 2) -> int:
    """Prints a message to stderr and returns the exit code that goes with it."""
    print(f"hosts.py: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
