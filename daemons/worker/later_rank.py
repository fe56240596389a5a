"""A later rank: `python -m daemons.worker.later_rank RUN_DIRECTORY NAME INCARNATION RANK FD`.

The worker, rank 0, starts it and talks to it over the socket FD. It exits when the worker does.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from daemons.parent_death import end_with
from daemons.process import read_job
from daemons.worker.building import build_replica, make_engine
from daemons.worker.hogwild.ranks import Later
from daemons.worker.ranks.rank_group import (
    ALIVE_S,
    BUILT,
    MET,
    RankMessage,
    join_group,
    receive,
    send,
)
from daemons.worker.task.failures import failure_of
from dlctl import registry
from dlctl.algorithms.engines import Operations
from dlctl.job.config import JobFile
from dlctl.launch.base import HOST_FILE
from dlctl.wire.messages import Array

Make = Callable[[RankMessage], tuple[dict[str, Any], Sequence[Array]]]
"""Performs a call of rank 0; returns the header and the arrays of the answer."""


class Rank:
    def __init__(self, link: Connection, job: JobFile, rank: int, run: Path | None) -> None:
        """run: directory of the run whose stored code is used; None: the current files."""
        self.link = link
        self._run = run
        self.job = job
        self.rank = rank
        self.step = 0
        self._lock = threading.Lock()
        """A lock that is held while a message is sent."""
        self._calls: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        for does in (self._listen, self._send_heartbeats):
            threading.Thread(target=does, daemon=True).start()

    def run(self) -> None:
        """Serve until the worker exits, and report errors to it."""
        try:
            self._serve()
        except BaseException as error:
            failed = failure_of(error)
            self._send("failed", error=failed.error, detail=failed.detail)
        # Keep the connection open: others would take its end for the cause. The worker kills us.
        threading.Event().wait()

    def _serve(self) -> None:
        begin = self._calls.get().header
        if self.job.replica.hogwild > 1:
            later = Later(self.job, begin, self.rank, self._run)
            self._report_step(BUILT)
            later.share(self._calls.get().header["data"])
            make: Make = later.make
        else:
            make = self._join(begin)
        self._report_step(MET)
        while True:
            answer, arrays = make(self._calls.get())
            self._report_step(self.step + 1, arrays, **answer)

    def _join(self, begin: dict[str, Any]) -> Make:
        """Build the model and join the group. Returns what performs the calls of rank 0."""
        replica = build_replica(self.job, begin["slot"], self.rank, self._run)
        replica.reseed(begin["slot"], begin["term"], self.rank * (self.job.replica.ranks > 1))
        self._report_step(BUILT)
        meet, ranks = self._calls.get().header, begin["ranks"]
        group = join_group(begin["store"], self.rank, ranks, meet["limit_s"], meet["device"])
        if self.job.replica.ranks > 1:
            from daemons.worker.ranks.cut_replica import PartCalls

            return PartCalls(self.job, replica, begin, self.rank).make
        method = registry.load("algorithms", self.job.algorithm.name)
        engine = make_engine(self.job, method.shape.engine, replica, self.rank, ranks, group)
        return partial(_make, engine)

    def _report_step(self, step: int, arrays: Sequence[Array] = (), **answer: Any) -> None:
        self.step = step
        self._send("at", arrays, step=step, **answer)

    def _send(self, kind: str, arrays: Sequence[Array] = (), **header: Any) -> None:
        try:
            with self._lock:
                send(self.link, kind, arrays, **header)
        except OSError:
            os._exit(0)

    def _listen(self) -> None:
        try:
            while True:
                self._calls.put(receive(self.link))
        except (EOFError, OSError):
            os._exit(0)  # The worker has exited.

    def _send_heartbeats(self) -> None:
        while True:
            self._send("alive")
            time.sleep(ALIVE_S)


def _make(engine: Operations, call: RankMessage) -> tuple[dict[str, Any], Sequence[Array]]:
    """Make an engine call; only rank 0 uses its result."""
    match call.kind:
        case "run":
            engine.run(call.header["op"], call.arrays)
        case "state":
            engine.state()
        case "restore":
            engine.restore(dict(zip(call.header["names"], call.arrays, strict=True)))
    return {}, ()


def main() -> None:
    directory, _, _, rank, fd = sys.argv[1:]
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    # If the parent ended before that call, the closed socket shows it.
    run = Path(directory)
    is_home = not (run / HOST_FILE).exists()
    Rank(Connection(int(fd)), read_job(run), int(rank), run if is_home else None).run()


if __name__ == "__main__":
    main()
