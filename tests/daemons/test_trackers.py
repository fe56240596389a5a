"""Trackers whose packages fail, hang or die: the coordinator never waits, and says so once.

In place of the package there is one that does what it is to do. The real ones are in
tests/integrations.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daemons.coordinator import trackers
from daemons.coordinator.trackers import Trackers
from daemons.tracker.client import settings
from daemons.tracker.notes import TrackerNotes
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.job.config import Choice, Job, JobFile, Log, Workers
from dlctl.observe import delivery
from dlctl.records.series import RUN
from dlctl.roles.protocol.effects import TrackerTrouble
from dlctl.runs.database import RunDb
from dlctl.util.redact import HIDDEN

PATIENCE_S = 40.0
SECRET = "s3cr3t"
WRITES = """
import json, os, sys, time
class Settings:
    def __init__(self, **_): pass
class Run:
    config = summary = {}
    def define_metric(self, *_, **__): pass
    def log(self, values, step, commit): say(step=values["step"])
    def mark_preempting(self): say(left=True)
    def finish(self, exit_code): say(exit=exit_code)
def say(**facts):
    with open(os.environ["SAID"], "a") as file: file.write(json.dumps(facts) + "\\n")
def init(id, **_):
    say(pid=os.getpid(), id=id)
    return Run()
"""
"""A package as wandb that writes down what it is told."""


class Place:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.said = directory, directory / "said"
        job = JobFile(job=Job(name="clouds", task="t.py:t"), log=Log(wandb="offline"))
        (directory / "job.json").write_text(json.dumps(config.to_dict(job)))
        root = Path(__file__).parents[2]
        RunDb(directory, create=True).close()
        monkeypatch.setenv("PYTHONPATH", f"{directory / 'packages'}{os.pathsep}{root}")
        monkeypatch.setenv("SAID", str(self.said))
        self.posted: list[TrackerTrouble] = []
        self.step = 0

    def package(self, text: str) -> None:
        folder = self.directory / "packages" / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)

    def begin(self) -> Trackers:
        with closing(RunDb(self.directory)) as db:
            return Trackers(self.directory, ["wandb"], self.posted.append, db)

    def add(self, exporter: Trackers, count: int = 1) -> None:
        for _ in range(count):
            self.step += 10
            exporter.add_row(*self.row(self.step))

    def row(self, step: int) -> tuple[float, str, int, dict[str, Any]]:
        return 1.76e9 + step, RUN, step, {"samples": 8, "seconds": 1.0, "loss": 0.5, "rates": {}}

    def facts(self, key: str) -> list[Any]:
        lines = self.said.read_text().splitlines() if self.said.exists() else []
        return [facts[key] for facts in map(json.loads, lines) if key in facts]

    def let_go(self, exporter: Trackers) -> None:
        """The coordinator leaves for another one."""
        (link,) = exporter._trackers
        assert link._process is not None
        exporter.close(None)
        assert link._process.wait(PATIENCE_S) == 0
        assert self.facts("left") == [True]

    def until(self, exporter: Trackers, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.posted
            exporter.tend()
            threading.Event().wait(0.02)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Nothing that was started here is left."""
    yield Place(tmp_path, monkeypatch)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, tmp_path)]
    assert not left


def _names(path: Path, directory: Path) -> bool:
    try:
        return str(directory).encode() in path.read_bytes()
    except OSError:
        return False


def test_a_package_that_fails_is_told_once_without_a_password(place: Place, caplog) -> None:
    place.package(f"raise ValueError('no entry at http://me:{SECRET}@host:1/x')")
    exporter = place.begin()
    place.add(exporter, 3)
    place.until(exporter, lambda: place.posted)
    (trouble,) = place.posted
    assert (trouble.tracker, trouble.dropped) == ("wandb", 0)
    assert trouble.why == f"no entry at http://{HIDDEN}@host:1/x"
    exporter.close("finished")
    assert len(place.posted) == 1
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "4 rows" in errors[0]
    assert SECRET not in caplog.text


def test_a_process_that_dies_is_told_of_and_the_next_one_gets_the_rest(place: Place) -> None:
    place.package(WRITES)
    exporter = place.begin()
    place.add(exporter, 2)
    place.until(exporter, lambda: place.facts("step") == [10, 20])
    (pid,) = place.facts("pid")
    os.kill(pid, signal.SIGKILL)
    place.add(exporter, 1)
    place.until(exporter, lambda: place.posted)
    assert "SIGKILL" in place.posted[0].why
    exporter.close("failed")
    # What the first one had not noted as written comes again.
    assert place.facts("step") == [10, 20, 10, 20, 30]
    assert place.facts("exit") == [1]
    assert place.facts("left") == []
    assert len(set(place.facts("id"))) == 1


def test_a_coordinator_of_many_daemons_has_trackers_too(place: Place) -> None:
    """Its descriptors have numbers that `select` does not take."""
    place.package(WRITES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < 1024:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        exporter = place.begin()
        place.add(exporter)
        place.until(exporter, lambda: place.facts("step") == [10])
        exporter.close("finished")
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert place.facts("exit") == [0]


def test_nobody_waits_for_a_process_that_a_kill_does_not_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.package("import threading; threading.Event().wait()")
    exporter = place.begin()
    exporter.tend()
    (link,) = exporter._trackers
    process = link._process
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        link._kill(process)
    assert "does not end" in caplog.text
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_another_coordinator_goes_on_with_the_run_and_repeats_no_step(place: Place) -> None:
    place.package(WRITES)
    first = place.begin()
    place.add(first, 2)
    first.tend()
    place.let_go(first)
    place.step = 10
    second = place.begin()
    place.add(second, 2)
    second.close("stopped")
    assert place.facts("step") == [10, 20, 30]
    assert place.facts("exit") == [1, 0]
    assert len(set(place.facts("id"))) == 1
    assert place.posted == []


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("phase", ["at the import", "in a row"])
def test_a_package_that_hangs_holds_up_nobody(
    place: Place, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 1.0)
    monkeypatch.setattr(delivery, "ROWS_MAX", 100)
    for limit in ("BEGIN_S", "ANSWER_S"):
        monkeypatch.setattr(delivery, limit, 2.0)
    hangs = "import threading; threading.Event().wait()"
    text = WRITES.replace('say(step=values["step"])', hangs)
    place.package(hangs if phase == "at the import" else text)
    exporter = place.begin()
    for _ in range(50):
        place.add(exporter, 3)
        exporter.tend()
    place.until(exporter, lambda: place.posted)
    assert "was killed" in place.posted[0].why
    assert place.posted[-1].dropped >= 50
    exporter.close("finished")


def test_what_had_come_when_its_coordinator_went_is_delivered(place: Place) -> None:
    """The process outlives it for a while."""
    place.package(WRITES)
    exporter = place.begin()
    place.add(exporter, 3)
    exporter.tend()
    place.let_go(exporter)
    assert place.facts("step") == [10, 20, 30]


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_whose_coordinator_went_before_it_could_look_ends(ends: bool) -> None:
    """It is told who has started it: its parent is another one by then."""
    parent = 1 if ends else os.getpid()
    code = (
        "import sys, threading; from daemons.tracker import orphan;"
        "orphan.LEAVE_S = 0; orphan.watch(int(sys.argv[1])).set(); print(flush=True);"
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if ends:
            assert process.wait(PATIENCE_S) == 1
        else:
            assert process.stdout.readline()
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("text", ['{"run": 7', "[]", '{"run": {}, "rows": 1, "last": 3}'])
def test_damaged_notes_are_a_problem_that_names_them(place: Place, text: str) -> None:
    place.package(WRITES)
    (place.directory / "trackers").mkdir()
    (place.directory / "trackers" / "wandb.json").write_text(text)
    exporter = place.begin()
    place.until(exporter, lambda: place.posted)
    assert "wandb.json is damaged" in place.posted[0].why
    exporter.close("finished")


def test_one_that_is_still_starting_at_the_end_delivers_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be making a database, which a signal would break."""
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    waits = "import threading; threading.Event().wait(1.5)"
    place.package(f"{waits}\n{WRITES}")
    exporter = place.begin()
    place.add(exporter, 3)
    exporter.close("finished")
    assert place.facts("step") == []
    (link,) = exporter._trackers
    assert link._process is not None
    assert link._process.wait(PATIENCE_S) == 0
    assert place.facts("step") == [10, 20, 30]
    assert place.facts("exit") == [0]


def test_rows_that_no_coordinator_has_sent_come_from_the_runs_database(place: Place) -> None:
    """As those that waited for a server when it was killed."""
    place.package(WRITES)
    first = place.begin()
    place.add(first, 2)
    first.tend()
    place.let_go(first)
    with closing(RunDb(place.directory)) as db:
        for step in (10, 20, 30, 40):
            db.add_metric(*place.row(step))
        db.commit()
    place.step = 40
    second = place.begin()
    place.add(second, 1)
    second.close("finished")
    assert place.facts("step") == [10, 20, 30, 40, 50]
    assert place.posted == []


def test_two_processes_never_have_one_tracker_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemons.tracker.notes.PREDECESSOR_S", 0.1)
    one, other = TrackerNotes(tmp_path, "wandb"), TrackerNotes(tmp_path, "wandb")
    with one.held():
        one.name(id="x7")
        with pytest.raises(DlctlError), other.held():
            pass
    with other.held():
        assert other.run == {"id": "x7"}


def test_the_settings_of_a_job_have_no_machines_and_no_secrets() -> None:
    arguments = ("--lr", "0.1", "--token", SECRET)
    job = JobFile(
        job=Job(name="clouds", script="t.py", args=arguments),
        algorithm=Choice(name="diloco", options={"local_steps": 50}),
        workers=Workers(count=2),
        log=Log(mlflow="http://host"),
    )
    found = settings(job)
    assert found["algorithm.name"] == "diloco"
    assert found["algorithm.local_steps"] == 50
    assert found["workers.count"] == 2
    assert found["job.args"] == f"--lr 0.1 --token {HIDDEN}"
    assert SECRET not in str(found)
    assert not [key for key in found if key.startswith(("hosts", "log", "launcher", "network"))]
