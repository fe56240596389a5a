"""A job file whose coordinators are stand-ins: see `launched.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_identity import identity
from stand_in_jobs import JOB, STAND_IN

from dlctl.launch import local
from dlctl.ops.problem_texts import CODES
from dlctl.util import processes

BEGUN_S = 10.0
WORK = "import signal; signal.pause()"
CODE = re.compile(r"  \[([a-z-]+)\]$", re.MULTILINE)


@pytest.fixture
def job(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job file, and stand-ins in place of its coordinators, which are ended with the test."""
    (own_place / "train.py").write_text("task = None\n")
    path = own_place / "job.toml"
    path.write_text(JOB)
    paths = [str(STAND_IN), *(p for p in sys.path if p)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    started: list[subprocess.Popen] = []
    start = local.start_coordinator

    def recorded(directory: Path) -> subprocess.Popen:
        started.append(start(directory))
        return started[-1]

    monkeypatch.setattr(local, "start_coordinator", recorded)
    yield path
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def dlctl_command(dlctl_command):
    """The same without the codes behind the lines of problems; each is one that is explained."""

    def command(*arguments: str):
        ended = dlctl_command(*arguments)
        unknown = {code for code in CODE.findall(ended.out) if code not in CODES}
        assert not unknown, f"codes that `dlctl explain` does not know: {unknown}"
        return ended._replace(out=CODE.sub("", ended.out))

    return command


@pytest.fixture
def clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time of day passes: what is told to the tenth of a second does not hang on the load."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the next coordinators do."""
    return lambda *scenes: monkeypatch.setenv("STAND_IN", ",".join(scenes))


@pytest.fixture
def daemon() -> Iterator[Callable[..., dict]]:
    """Starts processes that look like daemons: `daemon("server-0", directory)` is its identity."""
    with ExitStack() as started:

        def start(name: str, directory: Path) -> dict:
            role = name.partition("-")[0]
            words = [sys.executable, "-c", WORK, f"daemons.{role}", str(directory), name, "1", ""]
            process = started.enter_context(subprocess.Popen(words))
            started.callback(process.kill)
            known = identity(process.pid)
            # A program has begun a moment before its words are there to be read.
            until = time.monotonic() + BEGUN_S
            while not processes.command_line(known["pid"], known["pid_start"]):
                assert time.monotonic() < until, f"{name} has not begun"
            return known

        yield start


@pytest.fixture
def gone_process() -> dict:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        return identity(dead.pid)
