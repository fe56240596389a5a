"""A project's directory that was moved or copied: its runs come with it, or that is said."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from launched import the_run

from dlctl.runs import database
from dlctl.runs.database import RunDb


@pytest.fixture
def stopped(job, own_place, play, dlctl_command) -> dict:
    """A run of the job that was stopped at step 50."""
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    assert dlctl_command("stop").code == 0
    return the_run(own_place)


def moved(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The whole project at another place, where we are now."""
    place = own_place.with_name("elsewhere")
    own_place.rename(place)
    monkeypatch.chdir(place)
    return place


def test_a_run_that_was_moved_with_its_project_goes_on(
    stopped, job, own_place, dlctl_command, monkeypatch
):
    place = moved(own_place, monkeypatch)
    plan = json.loads(dlctl_command("plan", "job.toml", "--json").out)
    assert (plan["way"], plan["run_id"]) == ("resume", stopped["run_id"])
    was = f"was made for {job}, which is not there any more"
    assert f"  it {was}\n" in dlctl_command("plan", "job.toml").out
    assert the_run(place)["job_file"] == str(job), "only looked at"
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 0, err
    assert f"{stopped['run_id']} {was}: it belongs to job.toml now" in err
    assert f"resumes {stopped['run_id']} from step 50" in err
    run = the_run(place)
    assert (run["job_file"], run["step"]) == (str(place / "job.toml"), 50)
    monkeypatch.chdir("/")
    assert stopped["run_id"] in dlctl_command("ps").out
    assert dlctl_command("stop").code == 0


def test_a_run_that_died_before_it_was_moved_loses_nothing(
    job, own_place, play, dlctl_command, monkeypatch
):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    coordinator = psutil.Process(the_run(own_place)["pid"])
    coordinator.kill()
    psutil.wait_procs([coordinator], timeout=5)
    (directory,) = (own_place / "runs").iterdir()
    with closing(RunDb(directory)) as db:
        db.put_run(step=90)
        db.put_daemon("worker-0", {"name": "worker-0", "role": "worker", "state": "running"})
        db.put_memory({"run": ["running", "", 3.0], "work": [90, 1, 0.5, 64, [0, 0], None]})
        db.commit()
    place = moved(own_place, monkeypatch)
    plan = json.loads(dlctl_command("plan", "job.toml", "--json").out)
    assert (plan["way"], plan["changes"]) == ("go on", [])
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "goes on where it was, at step 90: nothing is lost" in err) == (0, True), err
    job_now = json.loads((place / "runs" / directory.name / "job.json").read_text())
    assert job_now["job"]["task"] == f"{place}/train.py:task"
    assert dlctl_command("stop").code == 0


@pytest.mark.long
def test_a_run_that_died_while_it_resumed_and_was_moved_goes_on(
    stopped, own_place, dlctl_command, monkeypatch
):
    """Before all its workers were at work it needs the checkpoint, and it knows the old path."""
    assert dlctl_command("start", "job.toml").code == 0
    died_resuming(own_place)
    place = moved(own_place, monkeypatch)
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "goes on where it was, at step 50" in err) == (0, True), err
    assert the_run(place)["step"] == 50
    assert dlctl_command("stop").code == 0


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("option", [[], ["--from-checkpoint"]])
def test_a_run_that_died_and_was_moved_is_brought_back_with_its_task_of_now(
    stopped, job, own_place, dlctl_command, monkeypatch, option
):
    assert dlctl_command("start", "job.toml").code == 0
    died_resuming(own_place)
    place = moved(own_place, monkeypatch)
    assert dlctl_command("recover", "--dry-run", "-j", stopped["run_id"]).code == 0
    assert the_run(place)["job_file"] == str(job), "only looked at"
    code, _, err = dlctl_command("recover", *option, "-j", f"runs/{stopped['run_id']}")
    assert code == 0, err
    told = f"was made for {job}, which is not there any more: it belongs to job.toml now"
    assert told in err
    assert (the_run(place)["job_file"], the_run(place)["step"]) == (str(place / "job.toml"), 50)
    job_now = json.loads((place / "runs" / stopped["run_id"] / "job.json").read_text())
    assert job_now["job"]["task"] == f"{place}/train.py:task"
    assert dlctl_command("stop").code == 0


@pytest.mark.long
def test_a_run_that_was_moved_without_its_job_file_keeps_its_task(
    stopped, job, own_place, dlctl_command, monkeypatch
):
    assert dlctl_command("start", "job.toml").code == 0
    died_resuming(own_place)
    place = moved(own_place, monkeypatch)
    (place / "job.toml").unlink()
    code, _, err = dlctl_command("recover", "-j", f"runs/{stopped['run_id']}")
    assert (code, "belongs to" in err) == (0, False), err
    assert the_run(place)["job_file"] == str(job)
    assert dlctl_command("stop", "-j", f"runs/{stopped['run_id']}").code == 0


def died_resuming(own_place: Path) -> None:
    """Kill the coordinator, and have it remember that not all were at work yet."""
    coordinator = psutil.Process(the_run(own_place)["pid"])
    coordinator.kill()
    psutil.wait_procs([coordinator], timeout=5)
    (directory,) = (own_place / "runs").iterdir()
    with closing(RunDb(directory)) as db:
        db.put_run(state="starting", ready_at=None)
        db.put_memory({"run": ["starting", "", None], "work": [50, 1, 0.5, 64, [0, 0], None]})
        db.commit()


def test_a_copy_of_a_project_begins_anew_and_says_so(
    stopped, job, own_place, dlctl_command, monkeypatch
):
    copy = own_place.with_name("copy")
    shutil.copytree(own_place, copy)
    monkeypatch.chdir(copy)
    told = f"made for {job}; it is not used: this directory is a copy: the run is in "
    assert told in dlctl_command("plan", "job.toml").err
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, told in err) == (0, True)
    assert f"a run of this name lies in runs/{stopped['run_id']}, " in err
    assert len(list((copy / "runs").iterdir())) == 2
    assert database.read(copy / "runs" / stopped["run_id"])["job_file"] == str(job)


def test_a_run_of_a_job_file_that_was_renamed_is_named(stopped, job, dlctl_command):
    job.rename(job.with_name("other.toml"))
    err = dlctl_command("plan", "other.toml").err
    assert "it is not used: to go on with it, call the job file job.toml again" in err


def test_a_run_whose_job_file_cannot_be_seen_is_left_to_whom_it_belongs(
    stopped, job, own_place, dlctl_command
):
    """Somebody else's home, of which this is a copy; root sees all but what cannot be there."""
    hidden = f"/{'home' * 100}/job.toml"
    with closing(RunDb(next(own_place.glob("runs/*-*")))) as db:
        db.put_run(job_file=hidden)
        db.commit()
    code, out, err = dlctl_command("plan", "job.toml")
    assert code == 0, err
    assert f"whether {hidden} is still there cannot be seen (File name too long)" in out + err


def test_a_run_that_lives_is_not_taken_from_its_place_and_can_be_stopped_where_it_is(
    stopped, job, own_place, dlctl_command, monkeypatch
):
    assert dlctl_command("start", "job.toml").code == 0
    run = the_run(own_place)
    place = moved(own_place, monkeypatch)
    err = dlctl_command("plan", "job.toml").err
    assert f"a run of this name lies in runs/{run['run_id']}, " in err
    directory = place / "runs" / run["run_id"]
    assert f"it is not used: processes of it live: dlctl stop -j {directory}\n" in err
    assert the_run(place)["job_file"] == str(job)
    code, _, err = dlctl_command("stop", "--no-checkpoint", "-j", str(directory))
    assert (code, the_run(place)["state"]) == (0, "stopped"), err


def test_runs_of_another_job_file_that_is_there_are_no_concern(stopped, job, dlctl_command):
    other = job.with_name("other.toml")
    other.write_text(job.read_text())
    assert "lies in" not in dlctl_command("plan", "other.toml").err
    assert dlctl_command("start", "job.toml").code == 0
    assert "lies in" not in dlctl_command("plan", "other.toml").err
    assert dlctl_command("stop", "-j", "job.toml").code == 0


def test_the_job_file_of_another_job_is_not_taken_for_a_run_s_own(
    stopped, job, own_place, dlctl_command
):
    """It has the same name, beside a run whose own job file is gone."""
    with closing(RunDb(next(own_place.glob("runs/*-*")))) as db:
        db.put_run(job_file="/before/job.toml")
        db.commit()
    assert "dlctl start job.toml" in dlctl_command("status").out
    job.write_text(job.read_text().replace('"quick"', '"slow"'))
    assert "dlctl start /before/job.toml" in dlctl_command("status").out
