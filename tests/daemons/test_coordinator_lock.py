"""A run has one coordinator: who finds the run directory held ends, and touches nothing."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dlctl.job import config
from dlctl.launch import local
from dlctl.runs import paths
from dlctl.runs.database import RunDb

ENDS_S = 60.0
FIRST = {"state": "running", "pid": 4711, "incarnation": 1, "control": "ipc:///nowhere"}
"""What is on record of the coordinator that has the run."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    job = config.JobFile(job=config.Job(name="held", task="none"))
    (tmp_path / "job.json").write_text(json.dumps(config.to_dict(job)))
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_run(**FIRST)
        db.commit()
    return tmp_path


@contextmanager
def held(directory: Path) -> Iterator[int]:
    """As the coordinator at work holds it."""
    descriptor = os.open(directory / paths.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_second_coordinator_of_a_run_is_refused_and_changes_nothing(directory: Path) -> None:
    with held(directory) as lock:
        touched_ns = os.fstat(lock).st_mtime_ns
        second = local.start(directory, "coordinator", "coordinator", 2, "")
        try:
            assert second.wait(ENDS_S) == 1
        finally:
            second.kill()
            second.wait()
        assert os.fstat(lock).st_mtime_ns == touched_ns, "by this an agent knows that one works"
    lines = paths.log_path(directory, "coordinator", 2).read_text().splitlines()
    (error,) = [line for line in map(json.loads, lines) if line["level"] == "error"]
    assert f"({directory}); dlctl status" in error["msg"]
    with closing(RunDb(directory, readonly=True)) as db:
        assert db.run() == FIRST
        assert list(db.events()) == []
