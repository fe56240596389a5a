"""Pinning of processes to cores, which a figure of two processes requires.

On a machine with two cores the scheduler places a server and its client on one core or on two, and
a request across cores takes twice as long, because a sleeping core has to wake up. The baseline is
moved at other times than dlctl, so an unpinned ratio would measure the scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def placements() -> dict[str, tuple[int, int]]:
    """Name -> (core of the servers, core of the client); only those that this machine has."""
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
    """All threads: ZeroMQ has its own beside the one that runs Python."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
