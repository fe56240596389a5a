"""Which run a command means, and which daemons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from process_identity import ME, OF_ANOTHER_BOOT

from dlctl.cli import daemon_names
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, NotFound, UsageError
from dlctl.runs import paths, select
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Unreadable, load, natural

KNOWN = ["coordinator", "server-0", "worker-0", "worker-1"]


def set_run(directory: Path, **values) -> None:
    with closing(RunDb(directory)) as db:
        db.put_run(**values)
        db.commit()


def started(run, at: float):
    os.utime(run.path / "job.json", (at, at))
    return run


def test_without_runs_the_way_to_the_first_one_is_shown(own_place):
    with pytest.raises(NotFound) as caught:
        select.look(None)
    assert "dlctl run" in caught.value.hint


def test_the_only_run_that_lives_is_meant_although_others_are_newer(run_directory):
    live = started(run_directory("a-0001").run(state="running", **ME), 1000)
    started(run_directory("b-0002").run(state="stopped"), 2000)
    assert select.look(None).directory == live.path


def test_without_a_live_one_the_newest_here_is_meant(run_directory, tmp_path, monkeypatch):
    started(run_directory("a-0001"), 1000)
    newest_here = started(run_directory("a-0002"), 2000)
    (tmp_path / "elsewhere").mkdir()
    assert select.look(None).directory == newest_here.path
    monkeypatch.chdir(tmp_path / "elsewhere")  # known from the index alone
    assert select.look(None).directory == newest_here.path


def test_several_live_runs_are_ambiguous(run_directory):
    for name in ("a-0001", "b-0002"):
        run_directory(name).run(state="running", **ME)
    with pytest.raises(UsageError, match="a-0001, b-0002") as caught:
        select.look(None)
    assert caught.value.hint.startswith("dlctl ps\n")


def test_a_job_name_means_its_newest_run(run_directory):
    started(run_directory("digits-0001"), 2000)
    newest = started(run_directory("digits-0002"), 3000)
    started(run_directory("other-0003"), 4000)
    assert select.look("digits").directory == newest.path
    assert select.look("digits-0001").run_id == "digits-0001"


def test_a_directory_or_a_job_file_is_understood(run_directory, own_place):
    file = own_place / "job.toml"
    file.write_text("")
    run = run_directory("digits-0001").run(job_file=str(file))
    assert select.look("runs/digits-0001").directory == run.path
    assert select.look("job.toml").directory == run.path
    (own_place / "other.toml").write_text("")
    with pytest.raises(NotFound, match=r'"other\.toml"'):
        select.look("other.toml")


def test_the_name_of_a_copied_run_directory_means_the_run(run_directory, tmp_path, monkeypatch):
    run = run_directory("digits-0001")
    shutil.copytree(run.path, tmp_path / "there" / "runs" / "digits-0001")
    monkeypatch.chdir(tmp_path / "there")
    assert select.look("digits-0001").directory == run.path
    with pytest.raises(Unreadable):
        select.look("runs/digits-0001")


def test_a_mistyped_name_gets_a_suggestion_and_says_where_it_came_from(run_directory, monkeypatch):
    run_directory("digits-0001")
    monkeypatch.setenv("DLCTL_JOB", "digist")
    with pytest.raises(
        NotFound, match='no run or job is called "digist"; did you mean "digits"'
    ) as c:
        select.look("digist")
    assert c.value.where == "DLCTL_JOB"
    assert c.value.exit_code == 4


def test_an_address_gets_the_command_that_takes_one():
    with pytest.raises(NotFound) as c:
        select.look("s3://bucket/digits")
    assert "dlctl checkpoint ls s3://bucket/digits" in c.value.hint


def test_one_unreadable_database_does_not_hide_the_other_runs(run_directory):
    good = run_directory("a-0001").run(state="running", **ME)
    bad = run_directory("b-0002")
    bad.db.close()
    (bad.path / "run.db").write_bytes(b"this is no database" * 100)
    assert select.look(None).directory == good.path
    with pytest.raises(DlctlError, match="database"):
        select.look("b-0002")


def test_a_run_whose_coordinator_is_gone_has_failed_whatever_its_database_says(run_directory):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pid = process.pid
    snapshot = load(run_directory().run(state="running", pid=pid, pid_start=OF_ANOTHER_BOOT).path)
    assert (snapshot.state, snapshot.is_live, snapshot.is_gone) == ("failed", False, True)
    assert f"(pid {pid}, " in snapshot.reason


def test_a_run_that_nobody_ever_started_is_not_pending_for_ever(run_directory):
    run = run_directory().run(state="pending")
    assert load(run.path).is_live
    started(run, time.time() - 3600)
    assert load(run.path).reason


def test_a_state_from_the_future_is_passed_on_as_text(run_directory):
    run = run_directory().run(state="hibernating", **ME)
    assert (load(run.path).state, load(run.path).is_live) == ("hibernating", True)
    run.run(pid_start=OF_ANOTHER_BOOT)
    assert (load(run.path).state, load(run.path).is_live) == ("hibernating", False)


def test_daemons_are_chosen_by_name_glob_and_role():
    assert daemon_names.match([], KNOWN) == KNOWN
    assert daemon_names.match(["worker-*", "server-0"], KNOWN) == [
        "server-0",
        "worker-0",
        "worker-1",
    ]


def test_a_daemon_that_does_not_exist_is_named_with_a_suggestion():
    with pytest.raises(NotFound, match='"worker-0" or "worker-1"'):
        daemon_names.match(["worker-7"], KNOWN)
    with pytest.raises(NotFound, match="zzz"):
        daemon_names.match(["zzz"], KNOWN)


def test_names_are_sorted_as_people_count():
    names = ["worker-10", "worker-9", "server-1", "agent-0", "coordinator", "zebra-2"]
    ordered = ["coordinator", "agent-0", "server-1", "worker-9", "worker-10", "zebra-2"]
    assert sorted(names, key=natural) == ordered


def test_daemons_that_have_yet_to_start_are_known_from_the_job(run_directory):
    run = run_directory(servers=1, workers=11).daemon("worker-3")
    names = list(load(run.path).roles())
    assert names[:3] == ["coordinator", "agent-0", "server-0"]
    assert names[-1] == "worker-10"


def test_a_run_is_known_all_the_time_while_it_is_entered_anew(run_directory, monkeypatch):
    """A command that brings it back may be killed at any moment."""
    run = run_directory("a-0001").run(state="stopped")
    seen = []
    for name in ("unlink", "symlink_to", "replace"):
        honest = getattr(Path, name)

        def looks(path, *rest, honest=honest, **more):
            try:
                return honest(path, *rest, **more)
            finally:
                seen.append(list(paths.all_runs()))

        monkeypatch.setattr(Path, name, looks)
    paths.register(run.path)
    assert seen == [[run.path]] * len(seen)
    assert seen


def test_who_works_in_a_project_means_its_runs(run_directory, tmp_path, monkeypatch):
    """Nobody ends, without a word, what runs for another project."""
    here = run_directory("digits-0001").run(state="stopped", name="digits", job_file="/a/job.toml")
    other = tmp_path / "other"
    (other / "runs").mkdir(parents=True)
    shutil.copytree(here.path, other / "runs" / "digits-0002")
    paths.register(other / "runs" / "digits-0002")
    ours = {"run_id": "digits-0002", "state": "running", "job_file": "/b/job.toml"}
    set_run(other / "runs" / "digits-0002", **ours, **ME)
    for job in (None, "digits"):
        assert select.look(job).directory == here.path
    monkeypatch.chdir(other)
    for job in (None, "digits"):
        assert select.look(job).run_id == "digits-0002"


def test_a_name_that_several_projects_have_is_ambiguous_elsewhere(
    run_directory, own_place, tmp_path, monkeypatch
):
    one, two = (run_directory(f"digits-000{n}").run(name="digits") for n in (1, 2))
    for run in (one, two):
        run.run(state="stopped")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other").mkdir()
    one.path = one.path.rename(tmp_path / "other" / one.path.name)
    paths.register(one.path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match='"digits"') as caught:
        select.look("digits")
    assert "digits-0001, digits-0002" in caught.value.message
    two.run(state="running", **ME)
    assert select.look("digits").run_id == "digits-0002"


def test_a_run_whose_job_file_was_renamed_is_meant_as_long_as_it_lives(run_directory, own_place):
    """The one of the new name is newer, but has ended: to stop that would do nothing."""
    lives, newer = (started(run_directory(f"digits-000{n}"), n) for n in (1, 2))
    lives.run(state="running", job_file=str(own_place / "a.toml"), **ME)
    (own_place / "b.toml").touch()
    newer.run(job_file=str(own_place / "b.toml"))
    assert select.look("digits").directory == lives.path
    newer.run(state="running", **ME)
    with pytest.raises(UsageError, match='"digits": digits-0001, digits-'):
        select.look("digits")


def test_the_run_of_another_place_is_not_taken_for_one_of_this_project(
    run_directory, tmp_path, monkeypatch, capsys
):
    """Its own may have been removed. Where nobody has runs, nothing has to be said."""
    run = run_directory("digits-0001")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    console.setup()
    assert select.look(None).directory == run.path
    assert capsys.readouterr().err == ""
    (here / "runs").mkdir()
    assert select.look(None).directory == run.path
    said = f"./runs has no run: using digits-0001 in {run.path.parent}\n"
    assert capsys.readouterr().err == said


def test_runs_that_were_left_behind_make_no_name_ambiguous(run_directory, own_place):
    """By a move of their project, of which `start` takes over the newest run, or by damage."""
    moved, damaged, newest = (started(run_directory(f"digits-000{n}"), n) for n in (1, 2, 3))
    (own_place / "job.toml").touch()
    moved.run(job_file="/before/job.toml")
    newest.run(job_file=str(own_place / "job.toml"))
    damaged.db.close()
    (damaged.path / "run.db").write_bytes(b"torn" * 4096)
    assert select.look("digits").directory == newest.path


def test_a_run_whose_database_was_removed_is_still_known(run_directory):
    run = run_directory("digits-0001")
    checkpoint = run.path / "ckpt" / "000000000008-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (run.path / "run.db").unlink()
    with pytest.raises(Unreadable, match=r"run\.db"):
        select.look(None)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(NotFound):
        select.look(None)


def test_a_job_file_whose_name_was_changed_means_the_run_that_lives(run_directory, own_place):
    file = own_place / "job.toml"
    file.touch()
    living = run_directory("a-0001").run(state="running", job_file=str(file), **ME)
    newer = run_directory("b-0002").run(state="stopped", job_file=str(file))
    assert select.look("job.toml").directory == living.path
    newer.run(state="running", **ME)
    two = r'several runs of "job\.toml" are running: a-0001, b-0002'
    with pytest.raises(UsageError, match=two):
        select.look("job.toml")


def test_a_job_file_whose_newest_run_cannot_be_read_does_not_mean_the_one_before(
    run_directory, own_place
):
    file = own_place / "job.toml"
    file.write_text('[job]\nname = "digits"\n')
    run_directory("digits-0001").run(state="stopped", job_file=str(file))
    newest = run_directory("digits-0002").run(state="stopped", job_file=str(file))
    newest.db.close()
    (newest.path / "job.toml").write_bytes(file.read_bytes())
    (newest.path / "run.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(DlctlError, match="database") as raised:
        select.look("job.toml")
    assert raised.value.where == str(newest.path / "run.db")
