"""A job file whose coordinators are stand-ins: see `launched.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import JOB, STAND_IN

from dlctl.launch import local


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
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the next coordinators do."""
    return lambda *scenes: monkeypatch.setenv("STAND_IN", ",".join(scenes))
