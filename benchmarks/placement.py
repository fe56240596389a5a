"""Which core a process runs on: the one thing that a figure of two processes must not leave open.

The scheduler of a machine with two cores puts a server and its client now on one core and now on
two, and a request that crosses cores takes twice as long, because a sleeping core has to be woken.
The bare baseline is moved at other times than dlctl is, so a ratio would measure the scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def placements() -> dict[str, tuple[int, int]]:
    """Name -> (core of the servers, core of the client), as far as this machine has them."""
    first, *others = sorted(os.sched_getaffinity(0))
    two = {"two cores": (others[0], first)} if others else {}
    return {**two, "one core": (first, first)}


@contextmanager
def pinned(servers: tuple[int, ...], cores: tuple[int, int]) -> Iterator[None]:
    """Keep the processes `servers` (pids) on one core and this process on the other."""
    before = os.sched_getaffinity(0)
    for pid in servers:
        _pin(pid, {cores[0]})
    _pin(os.getpid(), {cores[1]})
    try:
        yield
    finally:
        for pid in (*servers, os.getpid()):
            _pin(pid, before)


def _pin(pid: int, cores: set[int]) -> None:
    """All threads: ZeroMQ has one of its own beside the one that runs Python."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
