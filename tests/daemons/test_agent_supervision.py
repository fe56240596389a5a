"""Who starts the coordinator again, and when nobody has to."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from daemons.agent.supervision import Supervision
from daemons.loop import Loop
from dlctl.job.config import Servers
from dlctl.launch import local
from dlctl.roles.protocol.effects import CoordinatorGone, RestartCoordinator
from dlctl.runs.database import RunDb
from dlctl.util import processes
from dlctl.wire.machine import DeadlineReached, Exit, Started, StopRequested

LIMIT_S = 5.0


class Restarts:
    """An agent whose coordinator is away: it wants another one, and ends when it is told to."""

    def __init__(self) -> None:
        self.until = float("inf")

    def handle(self, event, now):
        match event:
            case Started():
                self.until = now + LIMIT_S
                return [RestartCoordinator()]
            case StopRequested(reason):
                return [Exit(0, reason)]
            case CoordinatorGone():
                return [Exit(0, "it is gone")]
            case DeadlineReached():
                return [Exit(1, "nobody said anything")]
        return []

    def deadline(self):
        return self.until


class Listens(Restarts):
    def handle(self, event, now):
        return [] if isinstance(event, Started) else super().handle(event, now)


@pytest.mark.parametrize("state", ["stopped", "finished", "failed"])
def test_a_run_that_somebody_has_ended_meanwhile_gets_no_coordinator_and_its_agent_leaves(
    tmp_path, state
):
    """A command may have done that, and been killed before it could end the agent."""
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_run(state=state, pid=None)
        db.commit()
    loop = Loop()
    Supervision(tmp_path, loop, still_s=10.0, servers=Servers())
    assert loop.run(Restarts()) == 0


@pytest.fixture
def unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """The second coordinator of a run, which does nothing; on record is the first, a dead one."""
    package = tmp_path / "code" / "daemons"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "coordinator.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_run(state="running", incarnation=1, pid=os.getpid(), pid_start="before:1")
        db.commit()
    (tmp_path / "lock").touch()
    process = local.start(tmp_path, "coordinator", "coordinator", 2, "")
    yield process
    processes.end([each.row() for each in local.living(tmp_path)], 0.0)
    process.wait()


def test_a_coordinator_that_is_not_on_record_is_killed_when_it_stands_still(tmp_path, unrecorded):
    loop = Loop()
    supervision = Supervision(tmp_path, loop, still_s=0.0, servers=Servers())
    supervision.begin()
    supervision.look()
    assert unrecorded.poll() is None
    supervision.look()
    unrecorded.wait(LIMIT_S)
    assert loop.run(Listens()) == 0, "it is seen to end"


def test_a_lock_that_cannot_be_touched_says_nothing_against_the_coordinator(
    tmp_path, unrecorded, monkeypatch
):
    """After an error the file system is read-only: who works seems to stand still, too."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    loop = Loop()
    supervision = Supervision(tmp_path, loop, still_s=0.0, servers=Servers())
    supervision.begin()
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refused)
        for _ in range(3):
            supervision.look()
    assert unrecorded.poll() is None
    supervision.look()
    assert unrecorded.wait(LIMIT_S) == -signal.SIGKILL
    assert loop.run(Listens()) == 0


def test_beside_a_coordinator_that_is_not_on_record_no_other_is_started(tmp_path, unrecorded):
    loop = Loop()
    Supervision(tmp_path, loop, still_s=10.0, servers=Servers())
    loop.chores.append(unrecorded.kill)
    assert loop.run(Restarts()) == 0, "it is seen to end"
    with closing(RunDb(tmp_path)) as db:
        assert db.run()["incarnation"] == 1
