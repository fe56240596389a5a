"""Where the processes of a peer run, and the bytes on the wire there.

`loopback` is this machine, with a private loopback if possible. `links` is a cluster of network
namespaces: each worker is on a host behind a slow link, and central processes (a parameter server,
dlctl's coordinator) are in the lab, where all links meet.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests.hosts.cluster import LAB, Cluster, missing

ROOT = Path(__file__).parents[2]
PRIVATE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Private network and pid namespaces; when the first process exits, the kernel kills the others."""
HOLD = "mount -t tmpfs shm /dev/shm && ip link set lo up && echo up && exec cat"
"""Private shared memory, too, so that nothing of it remains however the processes exit."""


@dataclass(frozen=True)
class Spot:
    """A place for one process: the prefix of its command line, its address and its network."""

    enter: tuple[str, ...]
    address: str
    interface: str


@dataclass(frozen=True)
class Place:
    head: Spot
    workers: list[Spot]
    """One for each worker."""
    counters: list[Callable[[], int]]
    """Bytes sent so far, one counter for each network."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    hosts: tuple[str, ...] = ()
    """ssh names of the workers' places, from the head; (): they are on the head."""
    processes: Callable[[], list[psutil.Process]] = lambda: list(psutil.process_iter())
    """All processes there, with the pids of this machine."""

    def sent_bytes(self) -> int:
        """Total of all networks since the start."""
        return sum(count() for count in self.counters)


def sent_bytes(interface: str, process: str = "thread-self") -> int:
    """In the network namespace of a process, by default the calling thread's."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise LookupError(f"no interface {interface}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def loopback(workers: int) -> Iterator[Place]:
    """All processes on this machine. Without root, the loopback's other traffic counts, too."""
    if os.geteuid():
        spot = Spot((), "127.0.0.1", "lo")
        yield Place(spot, [spot] * workers, [partial(sent_bytes, "lo")])
        return
    holder = subprocess.Popen(
        [*PRIVATE, "sh", "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != "up\n":
            raise RuntimeError("no network namespace: see standard error")
        first = _only_child(holder.pid)
        enter = ("nsenter", "-t", str(first), "--net", "--pid", "--mount", "--")
        spot = Spot(enter, "127.0.0.1", "lo")
        yield Place(spot, [spot] * workers, [partial(sent_bytes, "lo", str(first))])
    finally:
        holder.stdin.close()  # `cat` exits, and the kernel kills all in its namespaces.
        holder.wait()
        holder.stdout.close()


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def why_no_links() -> str:
    """ "" if there can be slow links here."""
    return missing()


@contextmanager
def links(workers: int, mbit_per_s: float, delay_ms: float, shared: Path) -> Iterator[Place]:
    """Each worker behind its own link; `delay_ms` is one way.

    shared: a directory that all processes can read and write.
    """
    code = [ROOT / "benchmarks", ROOT / "examples", ROOT / "tests"]
    with Cluster(count=workers, shared=[*code, shared]) as cluster, ExitStack() as threads:
        for name in cluster.names:
            cluster.shape(name, mbit_per_s, delay_ms)
        head = Spot(cluster.enter, cluster.address(LAB), "br0")
        spots = [Spot(cluster.inside(n), cluster.address(n), "eth0") for n in cluster.names]
        counters = [
            partial(_counted, threads.enter_context(cluster.thread(name)), interface)
            for name, interface in ((LAB, "br0"), *((name, "eth0") for name in cluster.names))
        ]

        def processes() -> list[psutil.Process]:
            return [p for name in (LAB, *cluster.names) for p in cluster.processes(name)]

        yield Place(head, spots, counters, cluster.env, tuple(cluster.names), processes)


def _counted(thread: Executor, interface: str) -> int:
    return thread.submit(sent_bytes, interface).result()
