"""Runs whose database cannot be read: no new one begins unnoticed, and what next is said."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from dead_runs import damaged_page, save
from fake_daemon import orphan
from next_step_lines import commands_of
from stand_in_jobs import JOB, the_run

from dlctl.launch import local
from dlctl.runs import database
from dlctl.runs.snapshot import Unreadable, load

LOOKING = [
    ("status",), ("why",), ("logs", "--failed"), ("stop",), ("recover",), ("events",), ("verify",),
]  # fmt: skip


def overwrite(directory: Path, first: int = 0) -> None:
    """Bytes of the database from `first` on, and its log."""
    path = directory / database.FILE
    data = bytearray(path.read_bytes())
    data[first:] = b"\xff" * (len(data) - first)
    path.write_bytes(data)
    for log in directory.glob(f"{database.FILE}-*"):
        log.write_bytes(b"\xff" * log.stat().st_size)


@pytest.fixture
def stopped(job, play, own_place, dlctl_command) -> Path:
    """The directory of a run that was stopped, with two checkpoints."""
    play("start", "ready", "forever")
    for _ in range(2):
        dlctl_command("start", "job.toml")
        dlctl_command("stop")
    return Path(the_run(own_place)["directory"])


@pytest.fixture
def lost(stopped) -> Path:
    """The same, with a database that cannot be read."""
    overwrite(stopped)
    with pytest.raises(Unreadable):
        load(stopped)
    return stopped


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("command", ["start", "run", "plan"])
def test_no_new_run_begins_while_the_last_one_cannot_be_read(
    lost, own_place, dlctl_command, command
):
    code, _, err = dlctl_command(command, "job.toml")
    assert code == 1
    newest = sorted(lost.glob("ckpt/*-2"))[0].relative_to(own_place)
    assert f"  --> {lost / database.FILE}\n" in err
    assert commands_of(err) == [f"dlctl start --from {newest} job.toml"]
    assert [path.name for path in (own_place / "runs").iterdir()] == [lost.name]


def test_a_fresh_run_is_begun_and_is_the_one_that_start_goes_on_with_then(
    lost, own_place, dlctl_command
):
    assert dlctl_command("start", "--fresh", "job.toml").code == 0
    dlctl_command("stop", "-j", next(d for d in os.listdir("runs") if d != lost.name))
    assert dlctl_command("start", "job.toml").code == 0
    assert len(list((own_place / "runs").iterdir())) == 2


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("command", LOOKING)
def test_every_command_says_what_next_and_that_works_as_it_stands(
    lost, own_place, dlctl_command, command
):
    code, _, err = dlctl_command(*command)
    assert (code, str(lost / database.FILE) in err) == (1, True)
    (on,) = commands_of(err)
    assert on.startswith("dlctl start --from runs/")
    assert "JOBFILE" not in err
    assert dlctl_command("checkpoint", "verify").code == 0
    assert dlctl_command(*shlex.split(on)[1:]).code == 0


def test_ps_lists_what_cannot_be_read(lost, dlctl_command):
    line = dlctl_command("ps").out.splitlines()[1]
    assert line.split()[:3] == [lost.name, "unreadable", "downpour"]
    assert dlctl_command("ps", "-a").out.count("unreadable") == 1
    assert dlctl_command("ps", "-q").out == f"{lost.name}\n"
    (run,) = json.loads(dlctl_command("ps", "--json").out)["runs"]
    assert (run["state"], run["is_live"], run["name"]) == ("unreadable", False, "quick")
    assert "run.db" in dlctl_command("status", "-j", "quick").err


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / database.FILE).write_bytes(b""),
        lambda directory: (directory / database.FILE).unlink(),
        lambda directory: overwrite(directory, 4096),
    ],
)
def test_a_database_that_is_empty_gone_or_damaged_in_part_is_refused_alike(
    stopped, own_place, dlctl_command, damage: Callable[[Path], None]
):
    for log in stopped.glob(f"{database.FILE}-*"):
        log.unlink()
    damage(stopped)
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 1
    assert "version 0" not in err
    newest = sorted(stopped.glob("ckpt/*"))[-1].relative_to(own_place)
    assert commands_of(err) == [f"dlctl start --from {newest} job.toml"]
    assert len(list((own_place / "runs").iterdir())) == 1


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("table", ["event", "memory"])
def test_a_run_is_not_gone_on_with_by_a_database_of_which_a_page_is_damaged(
    stopped, own_place, dlctl_command, table
):
    damaged_page(stopped, table)
    before = the_run(own_place)
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "run.db" in err) == (1, True)
    assert not re.search(r"\*\*\*|btree|error code", err), "how SQLite has it helps nobody"
    assert commands_of(err)[0].startswith("dlctl start --from runs/")
    assert the_run(own_place) == before


def test_a_damaged_page_is_no_bug_of_ours(stopped, dlctl_command):
    damaged_page(stopped, "event")
    code, _, err = dlctl_command("events", "-j", stopped.name)
    assert (code, "run.db" in err) == (1, True)
    assert commands_of(err)[0].startswith(f"dlctl start --from runs/{stopped.name}/ckpt/")


@pytest.mark.long
def test_damage_that_nobody_has_come_upon_is_told_by_all_alike(stopped, dlctl_command):
    """Of a table that they have no use for: else `why` and `stop` would send the user to `start`,
    which refuses."""
    damaged_page(stopped, "metric")
    for command in LOOKING:
        code, _, err = dlctl_command(*command)
        assert code == 1, command
        assert "run.db" in err, command
        assert "dlctl start --from runs/" in commands_of(err)[0], command
    assert dlctl_command("logs").code == 0


def test_the_job_file_is_the_one_that_is_as_the_run_s_copy(lost, job, dlctl_command):
    job.rename(job.with_name("my job.toml"))
    job.with_name("a.toml").write_text(JOB + "# another one of this name\n")
    assert commands_of(dlctl_command("status").err)[0].endswith(" 'my job.toml'")
    job.with_name("my job.toml").unlink()
    assert commands_of(dlctl_command("status").err)[0].endswith(" a.toml")


def test_daemons_of_it_that_live_are_named_and_ended(job, play, own_place, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    run = the_run(own_place)
    directory, process = Path(run["directory"]), psutil.Process(run["pid"])
    overwrite(directory)
    for command in (
        ("status",),
        ("stop",),
        ("start", "job.toml"),
        ("start", "--fresh", "job.toml"),
    ):
        code, _, err = dlctl_command(*command)
        assert (code, "coordinator\n" in err) == (1, True)
        assert commands_of(err)[0] == f"dlctl stop --kill -j runs/{directory.name}"
    assert dlctl_command("stop", "--kill", "-j", directory.name).code == 0
    assert (process.is_running() and process.status() != "zombie") is False
    assert list(local.living(directory)) == []
    assert dlctl_command("start", "--fresh", "job.toml").code == 0


def test_a_run_that_lives_is_ended_with_a_checkpoint_whatever_page_is_damaged(
    job, play, own_place, dlctl_command
):
    """Its coordinator has what it needs in memory: nothing has to be given up."""
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    directory = Path(the_run(own_place)["directory"])
    damaged_page(directory, "event")
    code, _, err = dlctl_command("recover")
    assert code == 0, err
    code, _, err = dlctl_command("events", "-j", directory.name)
    assert code == 1
    assert commands_of(err)[0] == f"dlctl stop -j runs/{directory.name}"
    assert dlctl_command("stop", "-j", directory.name).code == 0
    assert len(list(directory.glob("ckpt/*/manifest.json"))) == 1


def test_a_damaged_run_that_nobody_leads_is_ended_by_the_command_that_is_named(
    run_directory, daemon, gone_process, dlctl_command
):
    """Its agent lives: what stops a run in order needs a coordinator."""
    run = run_directory()
    run.run(state="running", step=44, updated_at=time.time() - 12, **gone_process)
    run.daemon("agent-0", incarnation=1, **daemon("agent-0", run.path))
    save(run, step=30, number=1)
    run.db.close()
    damaged_page(run.path, "event")
    with orphan(run.path, "worker-0", 1) as worker:
        code, _, err = dlctl_command("events")
        assert (code, commands_of(err)[0]) == (1, f"dlctl stop --kill -j runs/{run.path.name}")
        ended = dlctl_command("stop", "--kill", "-j", run.path.name)
        assert (ended.code, worker.wait(10) < 0) == (0, True), ended.err


def test_a_run_of_another_version_is_not_taken_for_none(stopped, own_place, dlctl_command):
    with closing(database.RunDb(stopped)) as db:
        db._db.execute("PRAGMA user_version=99")
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "version 99" in err) == (1, True)
    assert commands_of(err)[0].startswith("dlctl start --from runs/")
    assert "unreadable" in dlctl_command("ps").out
    assert len(list((own_place / "runs").iterdir())) == 1


@pytest.mark.long
def test_where_all_checkpoints_are_bad_verify_says_so_too(stopped, dlctl_command):
    for shard in stopped.glob("ckpt/*/shard-0.safetensors"):
        shard.write_bytes(b"")
    prune = f"dlctl checkpoint prune --damaged -j {stopped.name}"
    assert commands_of(dlctl_command("checkpoint", "verify").err) == [prune]
    overwrite(stopped)
    assert commands_of(dlctl_command("checkpoint", "verify").err) == [prune]
    assert dlctl_command(*shlex.split(prune)[1:]).code == 0
