"""`start`: which run a job becomes, and that nothing is left when it fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from next_step_lines import commands_of, flat
from process_identity import ME
from stand_in_jobs import JOB, attached, the_run

from dlctl.errors import TimedOut
from dlctl.ops import control
from dlctl.ops.changes import differences
from dlctl.runs import lock, paths
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import load
from dlctl.util import processes


def left_over(own_place: Path) -> list[str]:
    """Everything that a failed start could leave behind."""
    found = [str(p.relative_to(own_place)) for p in own_place.iterdir()]
    index = paths.index_dir()
    links = [link.name for link in index.iterdir()] if index.exists() else []
    return sorted(name for name in [*found, *links] if name not in ("train.py", "job.toml"))


# ---------------------------------------------------------------- start


def test_a_job_is_started_and_its_directory_is_complete(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    code, out, err = dlctl_command("start", "job.toml")
    assert (code, out) == (0, "")
    run = the_run(own_place)
    directory = Path(run["directory"])
    assert directory.name.startswith("quick-")
    assert err.splitlines()[0].startswith(
        "quick, downpour, sgd(lr=0.01) in each worker, sgd(lr=0.1)"
    )
    assert f"{directory.name} is running after" in err
    assert f"  dlctl stop -j {directory.name} " in err
    assert (run["state"], run["name"], run["algorithm"]) == ("running", "quick", "downpour")
    assert run["job_file"] == str(job)
    assert run["resume"] == ""
    assert (directory / "job.toml").read_text() == JOB
    assert json.loads((directory / "job.json").read_text())["workers"]["count"] == 2
    key = directory / "key"
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
    assert [found.name for found in paths.all_runs()] == [directory.name]


def test_starting_a_job_that_runs_already_does_nothing(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    pid = the_run(own_place)["pid"]
    again = dlctl_command("start", "job.toml")
    assert (again.code, "is already running" in again.err) == (0, True)
    assert the_run(own_place)["pid"] == pid
    assert dlctl_command("run", "job.toml").code == 0


def test_a_changed_job_file_is_refused_with_the_keys_that_differ(job, play, dlctl_command):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    job.write_text(JOB.replace("count = 2", "count = 3").replace("lr = 0.1", "lr = 0.2"))
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 2
    assert "optimizer.lr: 0.1 -> 0.2" in err
    assert "workers.count: 2 -> 3" in err
    assert "next: dlctl stop -j quick-" in err
    fresh = dlctl_command("start", "--fresh", "job.toml")
    assert (fresh.code, "is still running" in fresh.err) == (2, True)


def test_a_stopped_job_goes_on_from_its_checkpoint(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    assert dlctl_command("stop").code == 0
    first = the_run(own_place)
    assert (first["state"], first["step"]) == ("stopped", 50)
    with closing(RunDb(own_place / "runs" / first["run_id"])) as db:
        set_before = {"server-0": {"lr": 0.05}, "worker-0": {"push": 1e6, "fetch": 2e6}}
        db.put_run(settings=set_before)
        db.commit()
    # Other workers are no hindrance. What the job file says otherwise by now, counts.
    job.write_text(JOB.replace("count = 2", "count = 3") + '[limits]\nfetch = "3MB/s"\n')
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 0
    assert (
        f"{first['run_id']} resumes from step 50, from its checkpoint; --fresh starts a new run"
        in err
    )
    assert "still set: lr=0.05 of server-0" in err
    assert "still set: push=1 MB/s of worker-0" in err
    assert "no longer set: fetch=2 MB/s of worker-0; the job file takes precedence" in err
    assert the_run(own_place)["settings"] == {"server-0": {"lr": 0.05}, "worker-0": {"push": 1e6}}
    second = the_run(own_place)
    assert second["resume"] == first["checkpoint"]["path"]
    assert (second["state"], second["step"], second["ended_at"]) == ("running", 50, None)
    assert json.loads((Path(second["directory"]) / "job.json").read_text())["workers"]["count"] == 3
    assert dlctl_command("stop").code == 0
    assert the_run(own_place)["step"] == 100


def test_fresh_begins_a_new_run_and_keeps_the_old_one(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    assert dlctl_command("start", "--fresh", "job.toml").code == 0
    assert len(list((own_place / "runs").iterdir())) == 2
    assert dlctl_command("ps", "-q").out.count("quick-") == 2


def test_fresh_names_the_shards_that_a_failed_run_still_holds(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    directory = Path(the_run(own_place)["directory"])
    (directory / "state").mkdir()
    (directory / "state" / "shard-0.state").write_bytes(bytes(1_040_000))
    code, _, err = dlctl_command("start", "--fresh", "job.toml")
    assert code == 0
    assert f"the stored state of {directory.name} stays (1 shard)" in err
    assert f"dlctl stop --kill -j {directory.name}" in err


def cut_newest_checkpoint(directory: Path) -> None:
    shard = sorted(directory.glob("ckpt/*/shard-0.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_skipped_and_that_is_said_now_and_in_the_events(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    for _ in range(2):
        dlctl_command("start", "job.toml")
        dlctl_command("stop")
    cut_newest_checkpoint(Path(the_run(own_place)["directory"]))
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "cut off" in err) == (0, True)
    assert "from step 50" in err
    shown = dlctl_command("events", "--kind", "resumed").out.splitlines()
    assert shown[0].endswith("resumed from the checkpoint at step 50")
    cost = "50 steps done again (newer checkpoints are damaged)"
    assert shown[1].endswith(f"resumed from the checkpoint at step 50: {cost}")


def test_no_new_run_begins_in_silence_when_all_checkpoints_are_damaged(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    run = the_run(own_place)
    cut_newest_checkpoint(Path(run["directory"]))
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 1
    assert f"{run['run_id']} cannot resume: all of its checkpoints are damaged" in err
    assert "cut off" in err
    look, anew = f"dlctl checkpoint verify -j {run['run_id']}", "dlctl start --fresh job.toml"
    assert commands_of(err) == [look, anew]
    step = f"{look} shows what is wrong: all of its checkpoints are damaged or"
    assert f"next {step} {anew} starts over" in flat(dlctl_command("status").out)
    for command in ("why", "stop"):
        out = "".join(dlctl_command(command)[1:])
        assert (commands_of(out), f"next: {step}" in flat(out)) == ([look, anew], True)
    assert look in dlctl_command("recover").out
    assert (len(list((own_place / "runs").iterdir())), the_run(own_place)) == (1, run)
    assert dlctl_command("start", "--fresh", "job.toml").code == 0


def flip_newest_checkpoint(directory: Path) -> Path:
    """One bit of its values: it is as long as before. Returns that file."""
    shard = sorted(directory.glob("ckpt/*/shard-0.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard


@pytest.mark.long
def test_a_run_that_went_back_past_a_damaged_checkpoint_shows_the_one_it_goes_on_from(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    for _ in range(2):
        dlctl_command("start", "job.toml")
        dlctl_command("stop")
    assert "saved at step 100" not in dlctl_command("status").out
    flip_newest_checkpoint(Path(the_run(own_place)["directory"]))
    err = dlctl_command("start", "job.toml").err
    assert "from step 50, from its checkpoint; --fresh starts a new run" in err
    assert "50 steps done again (newer checkpoints are damaged)" in err
    assert "  checkpoint  step 50, " in dlctl_command("status").out
    assert the_run(own_place)["checkpoint"]["number"] == 1
    dlctl_command("stop", "--kill")
    resumes = "next dlctl start job.toml resumes from the checkpoint at step 50"
    assert resumes in flat(dlctl_command("status").out)


def test_start_refuses_to_go_on_from_damaged_checkpoints(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    run = the_run(own_place)
    shard = flip_newest_checkpoint(Path(run["directory"]))
    resumes = "next dlctl start job.toml resumes from the checkpoint at step 50"
    status = flat(dlctl_command("status").out)
    assert resumes in status, "to know better it would have to read all bytes"
    refused = dlctl_command("start", "job.toml")
    look = f"dlctl checkpoint verify -j {run['run_id']}"
    assert (refused.code, look in refused.err) == (1, True)
    flip_newest_checkpoint(shard.parents[2])  # Brought back from a backup, perhaps.
    assert resumes in flat(dlctl_command("status").out)
    assert dlctl_command("start", "job.toml").code == 0


def test_with_another_optimizer_a_new_run_begins_with_the_checkpoint(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    job.write_text(JOB.replace('"sgd"', '"adam"'))
    other = 'optimizer "sgd" -> "adam"; keeps: model, progress'
    told = f"{other}; starts over: adam in the servers"
    (old,) = (own_place / "runs").iterdir()
    plan = dlctl_command("plan", "job.toml")
    begins = f"a new run starts from the checkpoint of {old.name} at step 50"
    assert (plan.code, begins in flat(plan.out), told in flat(plan.out)) == (0, True, True)
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 0, err
    assert told in flat(err)
    assert f"a new run starts from the checkpoint of {old.name} at step 50" in flat(err)
    assert len(list((own_place / "runs").iterdir())) == 2
    dlctl_command("stop")
    assert " resumes from step " in dlctl_command("start", "job.toml").err, (
        "that run is of this job file"
    )


def test_a_finished_job_is_left_alone_until_its_goal_changes(job, own_place, play, dlctl_command):
    play("start", "ready", "finish")
    assert dlctl_command("run", "job.toml").code == 0
    again = dlctl_command("start", "job.toml")
    assert (again.code, "has already finished" in again.err) == (0, True)
    job.write_text(JOB.replace("epochs = 1", "epochs = 2"))
    play("start", "ready", "forever")
    on = dlctl_command("start", "job.toml")
    assert (on.code, "from step 100" in on.err) == (0, True)
    assert len(list((own_place / "runs").iterdir())) == 1


def test_a_run_whose_coordinator_was_killed_goes_on(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    dlctl_command("start", "job.toml")
    coordinator = psutil.Process(the_run(own_place)["pid"])
    coordinator.kill()
    psutil.wait_procs([coordinator], timeout=5)
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "from step 50" in err) == (0, True), err


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(2, (0, "already running")), (3, (2, "running with a different version of this job file"))],
)
def test_a_coordinator_that_an_agent_has_started_just_now_is_not_joined_by_another(
    job, own_place, play, dlctl_command, monkeypatch, workers, expected
):
    """It has the run already, and is not on record yet."""
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    run = the_run(own_place)
    coordinator = psutil.Process(run["pid"])
    coordinator.kill()
    psutil.wait_procs([coordinator], timeout=5)
    directory = Path(run["directory"])
    job.write_text(JOB.replace("count = 2", f"count = {workers}"))

    def arrives(directory):
        with closing(RunDb(directory)) as db:
            db.put_run(state="running", **ME)
            db.commit()
        return load(directory)

    monkeypatch.setattr(control, "load", arrives)
    with (directory / paths.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = dlctl_command("start", "--no-wait", "job.toml")
    assert (code, f"{directory.name} is {expected[1]}" in err) == (expected[0], True), err


def test_a_start_waits_for_the_coordinator_of_a_run_that_has_just_finished(
    job, own_place, play, dlctl_command
):
    """It would write its own end over the run that goes on."""
    play("start", "ready", "finish_slowly")
    dlctl_command("start", "job.toml")
    assert dlctl_command("wait", "--for", "finished").code == 0
    job.write_text(JOB.replace("epochs = 1", "epochs = 2"))
    play("start", "ready", "forever")
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, " resumes from step " in err) == (0, True), err
    run = the_run(own_place)
    assert (run["state"], run["step"]) == ("running", 100)
    assert f"waiting for the coordinator of {run['run_id']} to exit (pid " in err


def test_not_waiting_returns_at_once_and_quiet_prints_the_run_id(
    job, own_place, play, dlctl_command
):
    play("start", "stick")
    code, out, err = dlctl_command("start", "-q", "--no-wait", "job.toml")
    assert (code, err) == (0, "")
    assert out.strip() == the_run(own_place)["run_id"]


def test_a_timeout_names_who_is_waited_for_and_leaves_the_run_alone(job, play, dlctl_command):
    play("start", "stick")
    code, _, err = dlctl_command("start", "--timeout", "3s", "job.toml")
    assert code == 6
    assert "starting  waiting for worker-0 (importing torch)" in err
    assert "is not ready but still starting after 3.0s; it waits for worker-0 (importing" in err
    assert dlctl_command("ps").out.split()[10] == "starting"


def test_following_a_start_shows_the_logs_until_the_end(job, play, dlctl_command):
    play("start", "ready", "warn", "linger", "finish")
    code, out, _ = dlctl_command("start", "-f", "job.toml")
    assert code == 0
    assert "worker-1 is behind by 6 steps" in out
    assert dlctl_command("start", "-f", "-d", "job.toml").code == 2


# ---------------------------------------------------------------- starts that fail


def test_a_coordinator_that_dies_at_once_is_quoted(job, own_place, play, dlctl_command):
    play("die")
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    assert "did not start: the coordinator died while it started: exit 1" in err
    assert "RuntimeError: there is no such task" in err
    assert the_run(own_place)["state"] == "failed"
    assert "failed: the coordinator died while it started: exit 1" in dlctl_command("events").out


def test_a_daemon_that_fails_while_starting_is_quoted(job, own_place, play, dlctl_command):
    play("start", "fail")
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    assert "did not start: worker-0: ImportError" in err
    assert "last lines of worker-0:" in err
    assert "ImportError: no module named tensors" in err
    assert "dlctl logs --failed -j quick-" in err
    ended = the_run(own_place)
    assert not processes.is_alive(ended["pid"], ended["pid_start"])


@pytest.mark.parametrize("scene", ["fail_once_ready", "fail_soon"])
def test_a_job_that_fails_soon_after_its_start_is_quoted_too(job, play, dlctl_command, scene):
    play("start", scene)
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    assert "failed soon after its start" in err
    assert "dlctl logs -f" not in err
    assert "ImportError: no module named tensors" in err


def test_a_job_file_that_is_not_valid_starts_nothing(job, own_place, dlctl_command):
    job.write_text(JOB.replace("count = 2", "count = 0"))
    assert dlctl_command("start", "job.toml").code == 2
    assert dlctl_command("start", "nothing.toml").code == 2
    assert left_over(own_place) == []


def test_a_coordinator_that_cannot_be_started_leaves_nothing(
    job, own_place, dlctl_command, monkeypatch
):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "/nowhere/python" in err) == (1, True)
    assert left_over(own_place) == []


def test_a_run_directory_that_cannot_be_made_is_named(job, own_place, dlctl_command):
    (own_place / "runs").write_text("a file")
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, str(own_place / "runs") in err) == (1, True)
    (own_place / "runs").unlink()
    (own_place / "runs").symlink_to(own_place / "nowhere")
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "a dangling link" in err) == (1, True)


@pytest.mark.parametrize("which", ["job.toml", "runs", "XDG_RUNTIME_DIR"])
def test_a_path_that_is_no_text_is_refused_before_anything_starts(
    job, own_place, dlctl_command, monkeypatch, tmp_path, which
):
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    latin.mkdir(mode=0o700)
    file = "job.toml"
    if which == "job.toml":
        (own_place / "train.py").rename(latin / "train.py")
        file = str((own_place / file).rename(latin / file))
    elif which == "runs":
        (own_place / "runs").symlink_to(latin)
    else:
        monkeypatch.setenv(which, str(latin))
    code, _, err = dlctl_command("start", file)
    assert code == 1
    assert "error: this path is not UTF-8" in err
    assert f"{tmp_path}/caf\\udce9" in err
    assert "rename the directory" in err
    assert left_over(own_place) == (["runs"] if which == "runs" else [])
    kept = ["job.toml", "train.py"] if which == "job.toml" else []
    assert sorted(path.name for path in latin.iterdir()) == kept


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory somebody else's")
def test_a_run_directory_of_somebody_else_is_refused(job, own_place, dlctl_command):
    (own_place / "runs").mkdir()
    os.chown(own_place / "runs", 12345, 12345)
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "not a directory of yours (uid 12345)" in err) == (1, True)
    assert list((own_place / "runs").iterdir()) == []


def test_a_socket_path_that_is_too_long_is_told_before_anything_starts(
    job, own_place, dlctl_command, monkeypatch, tmp_path
):
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "the kernel allows 107" in err) == (1, True)
    assert left_over(own_place) == []


def test_a_full_disk_leaves_nothing(job, own_place):
    """A real limit on file sizes, in a process of its own."""
    code = """
import resource, sys
from dlctl.cli import app as main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main.run(["start", "job.toml"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "error: cannot use the run's database" in done.stderr
    assert str(own_place / "runs") in done.stderr
    assert left_over(own_place) == []


def test_a_resume_that_fails_leaves_the_run_as_it_was(
    job, own_place, play, dlctl_command, monkeypatch
):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    before = the_run(own_place)
    job.write_text(JOB.replace("count = 2", "count = 3"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert dlctl_command("start", "job.toml").code == 1
    after = the_run(own_place)
    assert (after["state"], after["reason"]) == ("stopped", before["reason"])
    directory = Path(after["directory"])
    assert (directory / "job.toml").read_text() == JOB
    assert json.loads((directory / "job.json").read_text())["workers"]["count"] == 2


@pytest.mark.long
def test_two_commands_at_once_start_one_run(job, own_place, play):
    play("start", "ready", "forever")
    with attached("start", "-q", "job.toml") as one, attached("start", "-q", "job.toml") as other:
        ids = {process.communicate()[0].strip() for process in (one, other)}
    assert ids == {the_run(own_place)["run_id"]}
    psutil.Process(the_run(own_place)["pid"]).kill()


def test_a_job_is_started_by_a_lock_that_network_file_systems_grant(
    job, own_place, play, dlctl_command, monkeypatch
):
    """There is none here. They grant an exclusive lock only for a file that is open for writing,
    and somebody's lock on the job file is nobody's business."""
    flock = fcntl.flock

    def on_network(file, operation):
        descriptor = file if isinstance(file, int) else file.fileno()
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)  # local even there
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and access == os.O_RDONLY and not is_directory:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    play("start", "ready", "forever")
    monkeypatch.setattr(fcntl, "flock", on_network)
    with job.open("rb") as stream:
        flock(stream, fcntl.LOCK_SH)
        assert dlctl_command("start", "job.toml").code == 0


def test_who_waits_for_another_start_of_the_job_says_so_and_not_for_ever(job, capsys):
    with (
        lock.starting(job),
        pytest.raises(TimedOut, match="another command has been starting"),
        lock.starting(job.parent / "." / job.name, timeout_s=0.01),
    ):
        raise AssertionError
    told = capsys.readouterr().err
    assert "waiting for another command that is starting this job" in told
    with lock.starting(job, timeout_s=0.0):
        assert lock.lock_path(job).exists()


def test_differences_are_named_as_in_the_job_file():
    before = {"optimizer": {"name": "sgd", "options": {"lr": 0.1}}, "job": {"stop": {"epochs": 1}}}
    after = {"optimizer": {"name": "sgd", "options": {"lr": 0.2}}, "job": {"stop": {"steps": 5}}}
    assert [change.text() for change in differences(before, after)] == [
        "optimizer.lr: 0.1 -> 0.2",
        "job.stop.epochs: 1 -> none",
        "job.stop.steps: none -> 5",
    ]
