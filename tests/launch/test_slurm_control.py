"""The job of a coordinator: its script as bash runs it, and what is asked of Slurm about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from dlctl.errors import DlctlError, TimedOut, Unreachable
from dlctl.launch import slurmcontrol
from dlctl.launch.slurmcontrol import SlurmControl
from dlctl.launch.slurmrequest import ControlJob
from dlctl.ops import recover
from dlctl.runs import reach
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import load
from dlctl.util import notes

UP_S = 20.0
ODD = "it's \"a $HOME `id` b"
PYTHON = """#!/bin/bash
# What the script starts: dlctl, and the end of the job.
case "$*" in
*slurmcontrol*) [ ! -e {place}/takes ]; exit $((! $?));;
*" wait "*) exit 1;;
esac
shift 3
printf '%s\\n' "$@" > {place}/words
touch {place}/runs
while [ ! -e {place}/end ]; do /bin/sleep 0.05; done
exit 4
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.delenv(slurmcontrol.VARIABLE, raising=False)
    monkeypatch.setattr(slurmcontrol, "POLL_S", 0.01)
    return tools


@pytest.fixture
def control(tmp_path: Path, tools: Path) -> SlurmControl:
    home = tmp_path / ODD
    home.mkdir()
    (home / "job.toml").touch()
    return slurmcontrol.of(ControlJob(), home / "job.toml", tmp_path / "orders", 0.1)


def put(tools: Path, command: str, script: str) -> None:
    (tools / command).write_text(f"#!/bin/bash\n{script}\n")
    (tools / command).chmod(0o755)


def until_there(path: Path) -> None:
    deadline, pause = time.monotonic() + UP_S, threading.Event()
    while not path.exists():
        assert time.monotonic() < deadline, path
        pause.wait(0.02)


# ---------------------------------------------------------------- the script


def begun(control: SlurmControl, place: Path, words: list[str]) -> subprocess.Popen[bytes]:
    script = control.directory / "job.sh"
    script.write_text(slurmcontrol.render(control, words))
    (place / "runs").unlink(missing_ok=True)
    job = subprocess.Popen(["bash", str(script)], env={**os.environ, "SLURM_JOB_ID": "7"})
    until_there(place / "runs")
    return job


def test_the_script_passes_odd_words_on_once_and_ends_with_the_run(
    control: SlurmControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(PYTHON.format(place=tmp_path))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(slurmcontrol, "LINGER_S", 0)
    control.directory.mkdir(parents=True)
    words = ["--fresh", f"--from=/x/{ODD}"]
    job = begun(control, tmp_path, words)
    try:
        expected = ["run", "--progress", "plain", *words, str(control.file)]
        assert (tmp_path / "words").read_text().splitlines() == expected
        job.send_signal(signal.SIGUSR1)  # Slurm takes no successor: the run goes on.
        job.send_signal(signal.SIGTERM)  # So it does until it has stopped.
    finally:
        (tmp_path / "end").touch()
        assert job.wait(UP_S) == 4
    assert control.started("7") == (4, "")
    assert (control.directory / "over.7").exists()

    (tmp_path / "end").unlink()
    (tmp_path / "takes").touch()
    job = begun(control, tmp_path, words)  # Its successor, or itself again.
    try:
        assert "--fresh" not in (tmp_path / "words").read_text()
        job.send_signal(signal.SIGUSR1)
        assert job.wait(UP_S) == 0
    finally:
        (tmp_path / "end").touch()


# ---------------------------------------------------------------- the queue


def test_a_job_that_is_about_to_end_is_none(control: SlurmControl, tools: Path) -> None:
    put(tools, "squeue", "echo '16 COMPLETING None'; echo '17 RUNNING None'")
    control.directory.mkdir(parents=True)
    assert control.find() == ("17", "RUNNING")
    (control.directory / "start.log").touch()
    (control.directory / "started.17").write_text("0\n")
    assert control.find() == ("17", "RUNNING")
    (control.directory / "over.17").touch()
    assert control.find() == ("", "")
    put(tools, "squeue", "echo '17 RUNNING None'; echo '18 PENDING Dependency'")
    assert control.find() == ("18", "PENDING Dependency")
    (control.directory / "over.17").unlink()
    (control.directory / "started.17").write_text("7\n")
    assert control.find() == ("18", "PENDING Dependency"), "the start in 17 has failed"
    put(tools, "squeue", "echo 'Unable to contact' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to contact"):
        control.find()


def test_the_next_job_waits_for_the_last_one(
    control: SlurmControl, tools: Path, tmp_path: Path
) -> None:
    put(tools, "squeue", "echo '17 RUNNING None'")
    put(tools, "sbatch", f'echo "$*" > {tmp_path}/asked; echo 18')
    control.directory.parent.mkdir()
    control.directory.mkdir(mode=0o700)
    for mark in ("over.17", "over.3", "started.3"):
        (control.directory / mark).touch()
    assert control.submit([]) == "18"
    assert "--dependency=singleton" in (tmp_path / "asked").read_text()
    marks = [path.name for path in control.directory.glob("*.*") if path.suffix[1:].isdigit()]
    assert marks == ["over.17"]


def test_a_start_waits_no_longer_than_its_time(control: SlurmControl, tools: Path) -> None:
    put(tools, "scontrol", "echo JobId=17 JobState=PENDING Reason=Priority")
    told: list[str] = []
    with pytest.raises(TimedOut, match="Priority") as caught:
        control.wait("17", told.append, 0.0)
    assert "scancel 17" in str(caught.value.hint)
    assert told == ["job 17 is pending: Priority"]


def test_a_job_is_cancelled_but_not_by_itself_nor_another_ones(
    control: SlurmControl, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tools, "scancel", f'echo "$*" >> {tmp_path}/cancelled')
    put(tools, "squeue", "echo somebodys-work")
    assert slurmcontrol.cancel("17") == ""
    put(tools, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurmcontrol.cancel("17") == ""
    put(tools, "squeue", "echo 'Unable to contact' >&2; exit 1")
    with pytest.raises(Unreachable):
        slurmcontrol.cancel("17")
    put(tools, "squeue", f"echo {control.name}")
    assert not (tmp_path / "cancelled").exists()
    assert "17" in slurmcontrol.cancel("17")
    assert (tmp_path / "cancelled").read_text() == "17\n"
    monkeypatch.setenv(slurmcontrol.VARIABLE, "18")
    assert slurmcontrol.cancel("18") == ""


# ---------------------------------------------------------------- its end


def handed_over(
    run: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *ends: str
) -> tuple[bool, bool]:
    """Whether a job has left its run to the next one, 18, and has cancelled that. ends: at which
    of the points "asked" and "killed" the run has stopped.
    """
    orders = tmp_path / f"{slurmcontrol.NAME}0"
    orders.mkdir()

    def stops() -> None:
        with closing(RunDb(run)) as db:
            db.put_run(state="stopped")
            db.commit()

    def succeeded(orders: Path) -> str:
        if "asked" in ends:
            stops()
        return "18"

    def kill_all(directory: Path) -> None:
        assert "asked" not in ends, "the run is over"
        if "killed" in ends:
            stops()

    monkeypatch.setattr(slurmcontrol, "_succeeded", succeeded)
    monkeypatch.setattr(slurmcontrol.local, "kill_all", kill_all)
    monkeypatch.setattr(slurmcontrol.select, "directory", lambda *_, **__: run)
    monkeypatch.setattr(slurmcontrol, "AGAIN_S", 0.0)
    put(tools, "squeue", f"echo {orders.name}")
    put(
        tools,
        "scancel",
        f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}; "
        f'echo "$*" > {tmp_path}/cancelled',
    )
    left = slurmcontrol.leave(tmp_path / "job.toml", orders)
    was_cancelled = (tmp_path / "cancelled").exists()
    assert not was_cancelled or (tmp_path / "cancelled").read_text() == "18\n"
    return left, was_cancelled


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((), (True, False)), (("asked",), (False, True)), (("killed",), (False, True))],
)
def test_a_run_that_was_stopped_while_the_next_job_was_submitted_is_left_to_nobody(
    run: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ends: tuple[str, ...], expected: tuple[bool, bool],
) -> None:  # fmt: skip
    """A stop finds only the job that it runs in; the next one would train the run again."""
    assert handed_over(run, tools, tmp_path, monkeypatch, *ends) == expected


# ---------------------------------------------------------------- the way there


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "digits-7f3a"
    directory.mkdir(parents=True)
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(state="running", job_file="/x/job.toml", pid=2**22 + 1, pid_start=1)
        db.commit()
    return directory


def test_commands_are_run_where_the_coordinator_is_if_that_is_known(
    run: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(notes, "_note", said.append)
    slurmcontrol.reach("17").write(run)
    with pytest.raises(Unreachable, match="the control job 17") as caught:
        reach.follow(run)
    assert "squeue" in str(caught.value.hint), "it is not here"
    put(tools, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to contact"):
        reach.follow(run)
    put(tools, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    reach.follow(run)
    put(tools, "squeue", "echo 'PENDING BeginTime'")
    reach.follow(run)
    assert said == ["the control job 17 is pending begintime: this is what is on record"]
    shown = reach.seen(load(run))
    assert (shown.state, shown.is_live) == ("recovering", True)
    put(tools, "squeue", "echo 'RUNNING None'")
    assert reach.seen(load(run)).state == "running"
    put(tools, "squeue", "exit 1")
    assert reach.seen(load(run)).state == "unknown"
    with closing(RunDb(run)) as db:
        db.put_run(state="stopped")
        db.commit()
    (tools / "squeue").unlink()
    assert reach.seen(load(run)).state == "stopped"
    reach.follow(run)


@pytest.mark.parametrize(
    "row",
    [
        {"launcher": "slurm", "place": "17; id"},
        {"launcher": "local", "place": "17"},
        {"launcher": "/tmp/theirs.py:Theirs", "place": "17"},
        {"what": "x", "variable": "X", "value": "1", "state": ["echo"], "command": ["id"]},
        ["slurm"],
    ],
)
def test_what_is_executed_is_from_no_file_of_a_run(run: Path, row: object) -> None:
    """Somebody may have passed on the directory."""
    (run / reach.FILE).write_text(json.dumps(row))
    assert reach.read(run) is None


def test_a_coordinator_with_a_job_of_its_own_is_not_started_elsewhere(
    run: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"nodes": 1, "jobs": "each", "control": {"cpus": 1}}
    places = [{"servers": 0}]
    job = {"launcher": {"name": "slurm", "options": options, "places": places}}
    (run / "job.json").write_text(json.dumps(job))
    with pytest.raises(DlctlError) as caught:
        recover._note_reach(run)
    assert caught.value.hint == "dlctl start /x/job.toml"
    monkeypatch.setenv(slurmcontrol.VARIABLE, "17")
    recover._note_reach(run)
    assert reach.read(run) == slurmcontrol.reach("17")
