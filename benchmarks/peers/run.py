"""Runs one peer: starts its processes, counts bytes, terminates them, and reads the result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import IO

import numpy as np
import psutil
import torch

from benchmarks.peers.places import ROOT, Place, Spot, free_port
from benchmarks.peers.settings import Settings
from benchmarks.peers.table import Peer
from benchmarks.peers.work import accuracy

COUNT_S = 0.02
OVERHEAD_S_MAX = 240.0
"""For start and shutdown, without the training."""
GRACE_S = 20.0
LAST_WORDS = 2000
MB = 1e6


class PeerFailed(Exception):
    """It failed, or did not exit; the text says how."""


@dataclass(frozen=True)
class Result:
    """The time until the accuracy was reached."""

    seconds: float
    """Since all processes were ready."""
    start_s: float
    """Before that: imports, loading the data, the barrier."""
    sent_mb: float
    """By all processes in `seconds`, with headers."""
    updates: int
    """Pushes or steps of all workers in `seconds`."""


def run(peer: Peer, place: Place, settings: Settings) -> Result:
    """Raises PeerFailed, also if the accuracy is not reached."""
    snapshots = Path(settings.snapshots)
    snapshots.unlink(missing_ok=True)
    began = time.time()
    with counting(place) as counts, _running(_starts(peer, place, settings)) as first:
        first.wait(settings.budget_s + OVERHEAD_S_MAX)
    return result_of(settings, began, counts)


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Start:
    """A process to start."""

    spot: Spot
    env: Mapping[str, str]
    program: str
    settings: Settings


def _starts(peer: Peer, place: Place, settings: Settings) -> list[Start]:
    """Rank 0 first."""
    spots = [place.head] if peer.is_one_program or peer.has_server else []
    spots += [] if peer.is_one_program else place.workers
    options = peer.options | ({"hosts": place.hosts} if place.hosts else {})
    whole = replace(
        settings, lr=peer.lr, options=options, address=spots[0].address, port=free_port()
    )
    return [
        Start(spot, place.env, peer.program, replace(whole, rank=rank))
        for rank, spot in enumerate(spots)
    ]


class Process:
    """A started process; its output goes to `said`."""

    def __init__(self, start: Start, log: IO[str]) -> None:
        interface = start.spot.interface
        here = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "PYTHONPATH": str(ROOT),
        }
        module = ["-m", f"benchmarks.peers.{start.program}", start.settings.to_json()]
        self._said, self._has_child = log, "--pid" in start.spot.enter
        self._process = subprocess.Popen(
            [*start.spot.enter, sys.executable, *module],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=ROOT, env={**start.env, **here}, start_new_session=True,
        )  # fmt: skip

    def wait(self, limit_s: float) -> None:
        """Raises PeerFailed with its last lines."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"not ended after {limit_s:.0f} s: {self._last_log_lines()}") from None
        if code:
            raise PeerFailed(f"ended with {code}: {self._last_log_lines()}")

    def _last_log_lines(self) -> str:
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS:]

    def end(self) -> None:
        """SIGTERM, so that it can terminate its children; after a timeout `kill`."""
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self._program().terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self.kill()

    def _program(self) -> psutil.Process:
        """The child, where a command enters a namespace: it waits for the child."""
        process = psutil.Process(self._process.pid)
        return next(iter(process.children()), process) if self._has_child else process

    def kill(self) -> None:
        """With all processes of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _running(starts: Sequence[Start]) -> Iterator[Process]:
    """The process of rank 0, with the others running; they are terminated after the block."""
    with ExitStack() as stack:
        processes = []
        for start in starts:
            process = Process(start, stack.enter_context(tempfile.TemporaryFile("w+")))
            stack.callback(process.kill if processes else process.end)
            processes.append(process)
        yield processes[0]


# ---------------------------------------------------------------- bytes and the result


@contextmanager
def counting(place: Place) -> Iterator[list[tuple[float, int]]]:
    """A growing list of (Unix time, bytes sent until then)."""
    counts = [(time.time(), place.sent_bytes())]
    over = Event()

    def count() -> None:
        while not over.wait(COUNT_S):
            counts.append((time.time(), place.sent_bytes()))

    thread = Thread(target=count)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def result_of(settings: Settings, began: float, counts: Sequence[tuple[float, int]]) -> Result:
    """When the target was reached according to the watch's file, and the bytes sent until then.

    began: Unix time of the first start. counts: from `counting`. Raises PeerFailed if the target
    was not reached.
    """
    snapshots = np.load(settings.snapshots)
    clock_at, seconds = float(snapshots["began"]), snapshots["seconds"]
    best = 0.0
    for i, copy in enumerate(snapshots["copies"]):
        reached = accuracy(settings.work, torch.from_numpy(copy))
        best = max(best, reached)
        if reached >= settings.target:
            at, sent = zip(*counts, strict=True)
            sent_mb = np.diff(np.interp([clock_at, snapshots["moments"][i]], at, sent))[0] / MB
            updates = int(snapshots["updates"][i])
            return Result(float(seconds[i]), clock_at - began, float(sent_mb), updates)
    raise PeerFailed(f"only {best:.3f} after {seconds[-1]:.1f} s")
