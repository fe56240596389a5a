"""Real trainings without dlctl's roles: one torch process, or torch's DDP, for comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dlctl.ops import other_process, simulate
from dlctl.ops.cases import Start
from dlctl.runs import paths
from dlctl.util import notes, regular

MODULE = "daemons.plain"
LOOK_S = 0.1
STORE = "ranks"
"""The file at which the ranks meet."""


def run(start: Start, directory: Path, name: str) -> None:
    """Train in a new run directory, with a process for each worker of the job, until the job's
    stop. Raises DlctlError for what fails in the user's code.
    """
    notes.note(f"{name} runs")
    simulate.prepare(directory, start)
    (directory / paths.SIMULATED).unlink()
    count = start.job.workers.count
    with ExitStack() as ends:
        ranks = [_Rank(directory, rank, count, ends) for rank in range(count)]
        while any(rank.process.poll() is None for rank in ranks):
            _check(ranks, start.file, name)
            time.sleep(LOOK_S)
        _check(ranks, start.file, name)
    (directory / paths.UNFINISHED).unlink(missing_ok=True)


class _Rank:
    """A process, which is killed at the end."""

    def __init__(self, directory: Path, rank: int, count: int, ends: ExitStack) -> None:
        self.log = directory / "logs" / f"rank-{rank}.txt"
        argv = [
            sys.executable, "-P", "-m", MODULE, str(directory), str(rank), str(count),
            str(directory / STORE),
        ]  # fmt: skip
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        out = ends.enter_context(os.fdopen(regular.descriptor(self.log, new), "wb"))
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=out, text=True)
        ends.callback(self.process.wait)
        ends.callback(self.process.kill)


def _check(ranks: Sequence[_Rank], file: Path, name: str) -> None:
    """Raises the error of the first rank that has failed: the others wait for it."""
    for rank in ranks:
        if rank.process.poll():
            errors = regular.read_bytes(rank.log).decode(errors="replace")
            code = rank.process.returncode
            raise other_process.error_of(errors, code, file, f"{name} has failed")
