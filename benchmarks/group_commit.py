"""Pushes per second of 16 workers to one server with durability "disk", whose commits share syncs.

The baseline is the same server with one fdatasync per commit. Each worker pushes again as soon as
its push is acknowledged, so up to 16 commits can be under way. Both sides alternate. Also measured:
one worker alone, whose commits cannot share anything; and what a dense push costs in written bytes,
against its own: the rest is bases of journals that are started over. The final state of the servers
is checked (replay.py). The directory for temporary files has to be on a disk: in memory a sync
takes no time, and nothing is written.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import zmq

from benchmarks.figures import Figure
from benchmarks.replay import Replay
from benchmarks.sandbox import sandbox
from benchmarks.shard import ANSWER_LIMIT_MS, Worker, serving
from dlctl import registry
from dlctl.launch import base
from dlctl.launch.base import Credentials
from dlctl.wire import messages as m

CHAPTER = "group_commit"
WORKERS, PARAMETERS, DENSITY = 16, 1_000_000, 0.0001
ASKED = 0.5
"""The time of a push against that with a sync for each: twice the pushes per second."""
WRITTEN_ASKED = 1.35
"""The bytes that a dense push of SGD writes against its own: one base for every four records."""
ALONE = """
from daemons.server import committing
committing.TOGETHER_MAX = 1
from daemons.server import __main__
"""
"""The server that syncs each commit alone."""


def measure(*, quick: bool) -> list[Figure]:
    rounds = 1 if quick else 3
    packed, pushed = _push()
    figures = []
    for workers, pushes, asked in ((WORKERS, 400, ASKED), (1, 100, None)):
        pushes = 2 * workers if quick else pushes
        crowd = "one worker" if workers == 1 else f"{workers} workers"
        what = f"{crowd}, sparse pushes / a sync for each"
        with ExitStack() as stack:
            sides = [stack.enter_context(_crowd(workers, start)) for start in (None, _start_alone)]
            values = [[side.rate(packed, pushes) for side in sides] for _ in range(rounds + 1)][1:]
            for side in sides:
                replay = Replay(f"{CHAPTER}: {what}", "sgd", PARAMETERS)
                replay.push(pushed, times=side.pushes)
                replay.compare(side.workers[0].fetch(), side.workers[0].version)
        ours, bare = (median(rates) for rates in zip(*values, strict=True))
        ratios = tuple(alone / together for together, alone in values)
        detail = f"{ours:.0f} against {bare:.0f} pushes/s"
        figures.append(Figure(CHAPTER, what, "x", ratios, asked, detail))
    return [*figures, _written(quick=quick)]


def _written(*, quick: bool) -> Figure:
    """Bytes that the server writes to the disk."""
    what, pushes = "4 workers, dense pushes, sgd: written / pushed bytes", 40
    kind = registry.load("compressors", "none")
    values = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    packed = kind(kind.Options()).take(values.copy())
    ratios, rates = [], []
    with _crowd(4, compressor="none") as crowd:
        for _ in range(1 if quick else 3):
            before = _written_bytes(crowd)
            rates.append(crowd.rate(packed, pushes))
            ratios.append((_written_bytes(crowd) - before) / (pushes * values.nbytes))
        replay = Replay(f"{CHAPTER}: {what}", "sgd", PARAMETERS)
        replay.push(values, times=crowd.pushes)
        replay.compare(crowd.workers[0].fetch(), crowd.workers[0].version)
    detail = f"{median(rates):.0f} pushes/s"
    return Figure(CHAPTER, what, "x", tuple(ratios), WRITTEN_ASKED, detail)


def _written_bytes(crowd: _Crowd) -> int:
    """Of its server so far. What is still in the page cache does not count."""
    lines = Path(f"/proc/{crowd.workers[0].server_pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def _push() -> tuple[m.Packed, np.ndarray]:
    """A push of a hundred elements, and its values: float32[PARAMETERS], mostly zero."""
    kind = registry.load("compressors", "topk")
    gradient = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
    whole = gradient.copy()
    packed: m.Packed = kind(kind.Options(density=DENSITY)).take(gradient)
    return packed, whole - gradient  # The residual is what was not sent.


class _Crowd:
    """Workers of one server, each with one push under way."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self._poller = zmq.Poller()
        self._of: dict[zmq.Socket[bytes], Worker] = {}
        for worker in workers:
            (socket,) = worker.sockets()
            self._of[socket] = worker
            self._poller.register(socket, zmq.POLLIN)

    @property
    def pushes(self) -> int:
        return sum(worker.pushes for worker in self.workers)

    def rate(self, packed: m.Packed, count: int) -> float:
        """Acknowledged pushes per second."""
        begun = time.perf_counter()
        for worker in self.workers:
            worker.send_push(packed)
        left, sent = count, len(self.workers)
        while left:
            ready = self._poller.poll(ANSWER_LIMIT_MS)
            if not ready:
                raise TimeoutError("no ack came")
            for socket, _ in ready:
                for came in self._of[socket].end.transport.receive(socket):
                    if not isinstance(came.message, m.Ack):
                        continue
                    assert came.message.outcome == m.APPLIED, came.message
                    left -= 1
                    if sent < count:
                        self._of[socket].send_push(packed)
                        sent += 1
        return count / (time.perf_counter() - begun)


@contextmanager
def _crowd(workers: int, start=None, compressor: str = "topk") -> Iterator[_Crowd]:
    options = {} if start is None else {"start": start}
    with (
        sandbox() as directory,
        serving(directory, "ipc", PARAMETERS, compressor=compressor, durability="disk",
                workers=workers, **options) as invitations,
        ExitStack() as stack,
    ):  # fmt: skip
        crowd = []
        for invitation in invitations:
            crowd.append(Worker(invitation))
            stack.callback(crowd[-1].close)
        yield _Crowd(crowd)


def _start_alone(
    directory: Path, role: str, name: str, incarnation: int, control: str, credentials: Credentials
) -> subprocess.Popen[bytes]:
    """As `local.start`."""
    argv = [sys.executable, "-c", ALONE, str(directory), name, str(incarnation), control]
    environment = base.environment(role, directory, name, incarnation)
    with (directory / "logs" / "alone").open("wb") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
