"""Where the processes of a peer run, and what goes over the wire there.

`Loopback` is this machine, with a loopback of the peer's own where that can be had. `Links` is a
cluster of network namespaces: each worker is on a host behind a slow link, and what serves all of
them (a parameter server, dlctl's coordinator) is in the lab, which every link leads to.
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
"""A network and processes of one's own; when the first process ends, so do all the others."""
HOLD = "mount -t tmpfs shm /dev/shm && ip link set lo up && echo up && exec cat"
"""Shared memory of one's own, too: nothing of it is left, however the processes end."""


@dataclass(frozen=True)
class Spot:
    """A place for one process: what its command line begins with, its address and its network."""

    enter: tuple[str, ...]
    address: str
    interface: str


@dataclass(frozen=True)
class Place:
    head: Spot
    workers: list[Spot]
    """One for each worker."""
    counters: list[Callable[[], int]]
    """Bytes sent so far, of every network that is part of it."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    hosts: tuple[str, ...] = ()
    """What ssh calls the places of the workers, from the head; (): they are where the head is."""
    processes: Callable[[], list[psutil.Process]] = lambda: list(psutil.process_iter())
    """All that run there, as this machine counts them."""

    def sent_bytes(self) -> int:
        """By all of them since the beginning."""
        return sum(count() for count in self.counters)


def sent_bytes(interface: str, process: str = "thread-self") -> int:
    """In the network of a process, the calling thread's if it is not said."""
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
    """All processes on this machine. Without root, what others send on its loopback counts, too."""
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
        holder.stdin.close()  # `cat` ends, and everything in its namespaces with it.
        holder.wait()
        holder.stdout.close()


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def why_no_links() -> str:
    """ "" if there can be slow links here."""
    return missing()


@contextmanager
def links(workers: int, mbit_per_s: float, delay_ms: float, shared: Path) -> Iterator[Place]:
    """Each worker behind a link of its own; `delay_ms` is that of one way.

    shared: a directory that everybody can read and write.
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
