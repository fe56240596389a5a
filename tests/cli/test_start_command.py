"""`start`: which run a job becomes, and that nothing is left when it fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from next_step_lines import commands_of
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


def test_a_job_is_started_and_its_directory_is_complete(
    job, own_place, play, dlctl_command, golden
):
    play("start", "ready", "forever")
    code, out, err = dlctl_command("start", "job.toml")
    assert (code, out) == (0, "")
    run = the_run(own_place)
    directory = Path(run["directory"])
    assert directory.name.startswith("quick-")
    golden("start", err)
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
    assert again.code == 0
    assert the_run(own_place)["pid"] == pid
    assert dlctl_command("run", "job.toml").code == 0


def test_a_changed_job_file_is_refused_with_the_keys_that_differ(job, play, dlctl_command):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    job.write_text(JOB.replace("count = 2", "count = 3").replace("lr = 0.1", "lr = 0.2"))
    ended = dlctl_command("start", "job.toml")
    assert (ended.code, ended.next.startswith("dlctl stop -j quick-")) == (2, True)
    assert "optimizer.lr: 0.1 -> 0.2" in ended.err
    assert "workers.count: 2 -> 3" in ended.err
    assert dlctl_command("start", "--fresh", "job.toml").code == 2


def test_a_stopped_job_goes_on_from_its_checkpoint(job, own_place, play, dlctl_command, golden):
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
    golden("start-resumes", err)
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
    assert (code, "1 shard" in err) == (0, True)
    assert f"dlctl stop --kill -j {directory.name}" in err


@pytest.mark.long
def test_the_state_of_a_run_that_two_later_ones_have_superseded_is_removed(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    begun, said = list[Path](), list[str]()
    for _ in range(3):
        said.append(dlctl_command("start", "--fresh", "job.toml").err)
        begun.append(({*(own_place / "runs").iterdir()} - {*begun}).pop())
        assert dlctl_command("stop", "-j", begun[-1].name).code == 0
        (begun[-1] / "state").mkdir()
        (begun[-1] / "state" / "shard-0.state").write_bytes(bytes(1_040_000))
    kept = [directory / "state" / "shard-0.state" for directory in begun]
    assert [path.exists() for path in kept] == [False, True, True]
    assert f"the stored state of {begun[0].name} is removed (1 shard)" in said[2]


def test_the_state_of_a_failed_run_without_a_checkpoint_is_removed_when_it_starts_over(
    job, own_place, play, dlctl_command
):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop", "--kill")
    (directory,) = (own_place / "runs").iterdir()
    (directory / "state").mkdir(exist_ok=True)
    (directory / "state" / "shard-0.state").write_bytes(bytes(1_040_000))
    assert dlctl_command("start", "job.toml").code == 0
    assert len([*(own_place / "runs").iterdir()]) == 2, "a new run"
    assert not (directory / "state" / "shard-0.state").exists()


def cut_newest_checkpoint(directory: Path) -> None:
    shard = sorted(directory.glob("ckpt/*/shard-0.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_skipped_and_that_is_said_now_and_in_the_events(
    job, own_place, play, dlctl_command, golden
):
    play("start", "ready", "forever")
    for _ in range(2):
        dlctl_command("start", "job.toml")
        dlctl_command("stop")
    cut_newest_checkpoint(Path(the_run(own_place)["directory"]))
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "shard-0.safetensors" in err) == (0, True)
    shown = dlctl_command("events", "--kind", "resumed").out
    texts = [line.split(maxsplit=1)[1] for line in shown.splitlines()]  # behind the time
    assert [re.findall(r"\b50\b", text) for text in texts] == [["50"], ["50", "50"]]
    golden("start-damaged", err)


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
    assert "shard-0.safetensors" in err
    look, anew = f"dlctl checkpoint verify -j {run['run_id']}", "dlctl start --fresh job.toml"
    assert commands_of(err) == [look, anew]
    assert dlctl_command("status").next == look
    for command in ("why", "stop"):
        assert commands_of("".join(dlctl_command(command)[1:])) == [look, anew]
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
    flip_newest_checkpoint(Path(the_run(own_place)["directory"]))
    err = dlctl_command("start", "job.toml").err
    assert err.count(" 50") >= 2, "from which step, and what is done again"
    assert "step 50," in dlctl_command("status").rows["checkpoint"]
    assert the_run(own_place)["checkpoint"]["number"] == 1
    dlctl_command("stop", "--kill")
    ended = dlctl_command("status")
    assert (ended.next, "step 50" in ended.out) == ("dlctl start job.toml", True)


def test_start_refuses_to_go_on_from_damaged_checkpoints(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    run = the_run(own_place)
    shard = flip_newest_checkpoint(Path(run["directory"]))
    status = dlctl_command("status")
    assert status.next == "dlctl start job.toml", "to know better it would have to read all bytes"
    refused = dlctl_command("start", "job.toml")
    look = f"dlctl checkpoint verify -j {run['run_id']}"
    assert (refused.code, look in refused.err) == (1, True)
    flip_newest_checkpoint(shard.parents[2])  # Brought back from a backup, perhaps.
    assert dlctl_command("status").next == "dlctl start job.toml"
    assert dlctl_command("start", "job.toml").code == 0


def test_with_another_optimizer_a_new_run_begins_with_the_checkpoint(
    job, own_place, play, dlctl_command, golden
):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    dlctl_command("stop")
    job.write_text(JOB.replace('"sgd"', '"adam"'))
    (old,) = (own_place / "runs").iterdir()
    plan = dlctl_command("plan", "job.toml")
    assert (plan.code, old.name in plan.out) == (0, True)
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 0, err
    assert old.name in err
    golden("start-other-optimizer", f"{plan.out}\n{err}")
    assert len(list((own_place / "runs").iterdir())) == 2
    dlctl_command("stop")
    dlctl_command("start", "job.toml")
    assert len(list((own_place / "runs").iterdir())) == 2, "that run is of this job file"


def test_a_finished_job_is_left_alone_until_its_goal_changes(job, own_place, play, dlctl_command):
    play("start", "ready", "finish")
    assert dlctl_command("run", "job.toml").code == 0
    again = dlctl_command("start", "job.toml")
    assert (again.code, the_run(own_place)["state"]) == (0, "finished")
    job.write_text(JOB.replace("epochs = 1", "epochs = 2"))
    play("start", "ready", "forever")
    on = dlctl_command("start", "job.toml")
    assert (on.code, the_run(own_place)["resume"] != "") == (0, True)
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
    assert (code, " step 50" in err) == (0, True), err


@pytest.mark.parametrize(("workers", "expected"), [(2, 0), (3, 2)])
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
    assert (code, directory.name in err) == (expected, True), err


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
    assert code == 0, err
    run = the_run(own_place)
    assert (run["state"], run["step"]) == ("running", 100)
    assert re.search(rf"{run['run_id']}\b.*\(pid \d+", err), "whom it waits for"


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
    assert err.count("worker-0 (importing torch") == 2, "while it waits, and in the end"
    assert dlctl_command("ps").out.split()[10] == "starting"


def test_following_a_start_shows_the_logs_until_the_end(job, play, dlctl_command):
    play("start", "ready", "warn", "linger", "finish")
    code, out, _ = dlctl_command("start", "-f", "job.toml")
    assert (code, "6 steps" in out) == (0, True)
    assert dlctl_command("start", "-f", "-d", "job.toml").code == 2


# ---------------------------------------------------------------- starts that fail


def test_a_coordinator_that_dies_at_once_is_quoted(job, own_place, play, dlctl_command):
    play("die")
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    assert "RuntimeError: " in err
    run = the_run(own_place)
    assert (run["state"], "exit 1" in run["reason"]) == ("failed", True)
    assert run["reason"] in dlctl_command("events").out


def test_a_daemon_that_fails_while_starting_is_quoted(job, own_place, play, dlctl_command, golden):
    play("start", "fail")
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    golden("start-fails", err)
    ended = the_run(own_place)
    assert not processes.is_alive(ended["pid"], ended["pid_start"])


@pytest.mark.parametrize("scene", ["fail_once_ready", "fail_soon"])
def test_a_job_that_fails_soon_after_its_start_is_quoted_too(job, play, dlctl_command, scene):
    play("start", scene)
    code, _, err = dlctl_command("start", "job.toml")
    assert code == 7
    assert ["dlctl logs -f" in err, "ImportError: " in err] == [False, True]


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
    assert (code, str(own_place / "runs") in err) == (1, True)


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
    assert (code, f"{tmp_path}/caf\\udce9" in err) == (1, True)
    assert left_over(own_place) == (["runs"] if which == "runs" else [])
    kept = ["job.toml", "train.py"] if which == "job.toml" else []
    assert sorted(path.name for path in latin.iterdir()) == kept


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory somebody else's")
def test_a_run_directory_of_somebody_else_is_refused(job, own_place, dlctl_command):
    (own_place / "runs").mkdir()
    os.chown(own_place / "runs", 12345, 12345)
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, "(uid 12345)" in err) == (1, True)
    assert list((own_place / "runs").iterdir()) == []


def test_a_socket_path_that_is_too_long_is_told_before_anything_starts(
    job, own_place, dlctl_command, monkeypatch, tmp_path
):
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    code, _, err = dlctl_command("start", "job.toml")
    assert (code, " 107" in err) == (1, True)
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
        pytest.raises(TimedOut),
        lock.starting(job.parent / "." / job.name, timeout_s=0.01),
    ):
        raise AssertionError
    assert capsys.readouterr().err
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
