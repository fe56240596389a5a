"""`recover`: which way leads back, what it loses, and which directories are refused."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from dead_runs import damaged_page, damaged_terms, issue, keep, remember, save
from next_step_lines import commands_of, flat
from process_identity import ME, identity

from dlctl.cli.ui import live
from dlctl.job import config
from dlctl.ops import cases, control, recover
from dlctl.ops.decide import Action
from dlctl.ops.ready import is_back, waiting_for
from dlctl.runs import database, kept_shards, lock, paths, terms
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import load
from dlctl.util.text import KILLED, OTHER_NUMBERS


def gone() -> dict:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        return identity(dead.pid)


@pytest.fixture
def dead(run_directory) -> Iterator:
    """A run that was at work; all its processes have died."""
    run = run_directory("recover-7f3a", servers=1, workers=2)
    place = lock.place(run.path)
    run.run(state="running", step=88, resume="", place=place, **gone())
    run.daemon("server-0", metrics={"version": 40}, **gone())
    yield run
    kept_shards.remove(run.path, config.Servers())


def with_a_host_that_is_lost(dead):
    """The same, of a job with another host, which nobody can reach."""
    content = json.loads((dead.path / "job.json").read_text())
    content["hosts"] = [{"ssh": "nowhere.invalid"}]
    content["launcher"]["name"] = "ssh"
    (dead.path / "job.json").write_text(json.dumps(content))
    return dead


def look(dlctl_command, *arguments: str) -> dict:
    ended = dlctl_command("recover", "--dry-run", "--json", *arguments)
    return json.loads(ended.out)


# ---------------------------------------------------------------- which way


def test_a_living_run_is_left_alone(run_directory, dlctl_command):
    run_directory().run(state="running", **ME).daemon("worker-1", state="quarantined")
    code, _, err = dlctl_command("recover")
    assert (code, err) == (0, "")
    assert (look(dlctl_command)["way"], look(dlctl_command)["done"]) == ("alive", False)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_coordinator_that_stands_still_is_not_said_to_work(
    run_directory, dlctl_command, monkeypatch, arguments
):
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
    run = run_directory().run(state="running", updated_at=time.time() - 22, **ME)
    run.daemon("agent-0", **ME)
    code, _, err = dlctl_command("recover", *arguments)
    assert (code, commands_of(err)[0].startswith("kill -9 ")) == (5, True)
    data = json.loads(dlctl_command("recover", "--json", *arguments).out)
    assert (data["way"], data["done"]) == ("silent", False)
    assert data["next"].startswith("kill -9 ")


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_what_has_ended_in_order_goes_on_with_start(run_directory, dlctl_command, state):
    run = run_directory().run(state=state, job_file="/x/my job.toml")
    save(run, step=90, number=1)
    ended = dlctl_command("recover")
    assert (ended.code, ended.next) == (0, "dlctl start '/x/my job.toml'")
    assert dlctl_command("recover", "--dry-run").out == ended.out
    assert look(dlctl_command)["way"] == "over"


def test_with_memory_and_all_shards_it_goes_on_and_nothing_is_lost(dead, dlctl_command, golden):
    remember(dead, "server-0")
    keep(dead, 0, version=41, deliveries=[[0, 1, 7]])
    found = look(dlctl_command)
    assert (found["way"], found["lost_steps"], found["lost_updates"]) == (
        "go on", 0, {"server-0": 0},
    )  # fmt: skip
    assert (found["step"], found["shards"][0]["version"]) == (90, 41)
    golden("recover", dlctl_command("recover", "--dry-run").out)


def fail(dead, job, reason: str, *, was_at_work: bool) -> None:
    """The run has ended itself, for this reason."""
    step = 90 if was_at_work else 0
    remember(dead, *(["server-0"] if was_at_work else []), state="failed", step=step)
    if was_at_work:
        keep(dead, 0, version=41, deliveries=[])
    else:
        dead.db.put_memory({"run": ["failed", reason, None]})
        dead.daemon("server-0", state="stopped", pid=None)
    dead.run(state="failed", reason=reason, step=step, job_file=str(job))


def test_a_run_that_never_got_to_work_starts_again(dead, job, dlctl_command):
    reason = f"worker-0: importing train.py raised ImportError: no ({job.parent}/train.py:4)"
    fail(dead, job, reason, was_at_work=False)
    found = look(dlctl_command, str(dead.path))
    assert (found["way"], found["was_at_work"]) == ("go on", False)
    assert any(reason in cause for cause in found["causes"])
    assert found["next"].startswith("fix train.py:4")


def ending(dead, state: str = "stopped", *, only_exits: bool = True, has_begun: bool = True):
    """The run was about to end when everything died; its servers had removed their shards."""
    served = ["server-0"] if has_begun else []
    remember(dead, *served, state="stopping", step=90 if has_begun else 0)
    released = True if has_begun else None
    dead.db.put_memory(
        {
            "run": ["stopping", "", released],
            "end": [state, "stopped by dlctl stop", 30.0, only_exits],
        }
    )
    dead.run(state="stopping", step=90 if has_begun else 0)
    return dead


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_a_run_whose_servers_were_about_to_exit_ends_and_does_not_train_again(
    dead, dlctl_command, state
):
    """Its last checkpoint is on record, from which it would go on otherwise."""
    save(ending(dead, state), step=90, number=2)
    found = look(dlctl_command)
    assert (found["way"], found["obstacles"], found["lost_steps"]) == ("go on", [], 0)
    assert found["only_exits"] is True
    back = look(dlctl_command, "--from-checkpoint")
    assert (back["way"], back["checkpoint"]["step"]) == ("resume", 90), "on request it does"


@pytest.mark.parametrize("how", [{"state": "failed"}, {"only_exits": False}])
def test_an_end_that_needs_the_shards_is_no_end_without_them(dead, dlctl_command, how):
    """Of a failed run they are kept; in a step before, the last checkpoint is to be made."""
    save(ending(dead, **how), step=60, number=2)
    found = look(dlctl_command)
    assert (found["way"], found["only_exits"]) == ("resume", False)
    keep(dead, 0, version=41, deliveries=[])
    assert look(dlctl_command)["way"] == "go on"


@pytest.mark.parametrize("has_begun", [True, False])
def test_start_ends_such_a_run_as_well(dead, job, has_begun):
    """As the next control job, or pod, calls it. Nobody has asked for a new run either."""
    ending(dead, has_begun=has_begun)
    start = cases.read(job)
    (dead.path / "job.json").write_text(json.dumps(start.content))
    case = cases.looked(cases.of_start(load(dead.path), start, fresh=False))
    assert case.action == Action.CONTINUE
    assert "ends" in cases.headline(case)
    process = recover.continue_run(case).process
    assert process is not None
    process.kill()
    process.wait()
    with closing(RunDb(dead.path, readonly=True)) as db:
        assert db.run()["state"] == "stopping"


def test_a_server_that_never_had_a_shard_needs_no_state(dead, dlctl_command):
    remember(dead)
    assert look(dlctl_command)["way"] == "go on"


def test_otherwise_the_newest_good_checkpoint_and_the_losses_in_numbers(
    dead, dlctl_command, clock_stands, golden
):
    remember(dead, "server-0")
    keep(dead, 0, version=41, deliveries=[])
    save(dead, step=30, number=1, version=20)
    damaged = save(dead, step=60, number=2, version=30)
    (damaged / "shard-0.safetensors").write_bytes(b"cut")
    found = look(dlctl_command, "--from-checkpoint")
    assert (found["way"], found["checkpoint"]["step"]) == ("resume", 30)
    assert (found["lost_steps"], found["lost_updates"]) == (60, {"server-0": 21})
    assert str(damaged.name) in found["damaged"][0]

    kept_shards.remove(dead.path, config.Servers())
    found = look(dlctl_command)
    assert (found["lost_steps"], found["lost_updates"]) == (60, {"server-0": 20})
    (obstacle,) = found["obstacles"]
    assert obstacle.startswith("server-0: ")
    golden("recover-from-checkpoint", dlctl_command("recover", "--dry-run").out)


def test_states_that_are_damaged_or_of_another_run_are_named(dead, run_directory, dlctl_command):
    remember(dead, "server-0")
    path = keep(dead, 0, version=1, deliveries=[])
    other = run_directory("recover-0000", servers=1).run(state="stopped")
    shutil.copy(keep(other, 0, version=1, deliveries=[]), path)
    kept_shards.remove(other.path, config.Servers())
    (obstacle,) = look(dlctl_command, str(dead.path))["obstacles"]
    assert "recover-0000" in obstacle
    path.write_bytes(b"x" * 4096)
    assert look(dlctl_command, str(dead.path))["way"] == "nothing"


def test_durability_none_keeps_nothing(dead, dlctl_command):
    job = config.JobFile(
        job=config.Job(name="recover", task="t.py:t"), servers=config.Servers(durability="none")
    )
    (dead.path / "job.json").write_text(json.dumps(config.to_dict(job)))
    remember(dead, "server-0")
    (obstacle,) = look(dlctl_command)["obstacles"]
    assert 'durability = "none"' in obstacle


def test_when_nothing_is_left_that_is_said_with_the_way_to_begin_anew(dead, dlctl_command, golden):
    dead.run(job_file="/x/job.toml")
    ended = dlctl_command("recover")
    assert (ended.code, ended.next) == (1, "dlctl start --fresh /x/job.toml")
    golden("recover-nothing", ended.err)


# ---------------------------------------------------------------- doing it


def test_the_next_coordinator_finds_a_living_run_with_its_memory(dead, job, play, dlctl_command):
    remember(dead, "server-0")
    keep(dead, 0, version=1, deliveries=[])
    dead.run(state="failed", reason="worker-0: boom", ended_at=5.0, control="ipc:///gone")
    dead.daemon("server-0", state="running", phase="serving").daemon("worker-0", state="running")
    play("start", "ready", "forever")
    ended = dlctl_command("recover", str(dead.path))
    assert ended.code == 0, ended.err
    assert "worker-0: boom" in ended.rows["cause"]
    run = dead.db.run()
    assert (run["state"], run["reason"], run["ended_at"]) == ("running", "", None)
    assert run["control"] != "ipc:///gone"
    assert dead.db.memory()["work"][0] == 90


def test_a_stream_whose_records_were_refused_goes_on_from_its_checkpoint(dead, dlctl_command):
    """Every command says so: its shards would be refused again."""
    remember(dead, "server-0")
    keep(dead, 0, version=1, deliveries=[])
    save(dead, step=50, number=1)
    assert look(dlctl_command, str(dead.path))["way"] == "go on"
    reason = f"worker-0: {OTHER_NUMBERS}, as dlctl did before"
    dead.run(state="failed", reason=reason, ended_at=time.time(), pid=None)
    found = look(dlctl_command, str(dead.path))
    assert (found["way"], found["obstacles"]) == ("resume", [OTHER_NUMBERS])
    for command in ("status", "why"):
        assert " step 50" in dlctl_command(command, "-j", str(dead.path)).out


def test_the_time_that_a_run_lay_dead_is_no_part_of_its_age(dead, job, play, dlctl_command):
    remember(dead, "server-0")
    keep(dead, 0, version=1, deliveries=[])
    dead.daemon("server-0", state="running", phase="serving").daemon("worker-0", state="running")
    now = time.time()
    dead.run(state="failed", reason="worker-0: boom", dead_s=50.0, started_at=now - 4000.0,
             ended_at=now - 3000.0)  # fmt: skip
    assert dlctl_command("status", "-j", str(dead.path)).out.splitlines()[0].split("  ")[2] == (
        "took 15m50s"
    )
    play("start", "ready", "forever")
    assert dlctl_command("recover", str(dead.path)).code == 0
    assert 3050 <= dead.db.run()["dead_s"] < 3150
    dead.run(started_at=now - 4000.0)  # the stand-in begins its own time
    up = dlctl_command("status", "-j", str(dead.path)).out.splitlines()[0].split("  ")[2]
    assert up.startswith("up 15m"), up


def test_what_a_run_took_is_all_that_it_ran(dead, job, play, dlctl_command):
    """Also before a checkpoint that it resumes from; not the time between."""
    remember(dead, "server-0")
    save(dead, step=30, number=1)
    now = time.time()
    dead.run(state="failed", reason="worker-0: boom", ran_s=100.0, dead_s=500.0,
             started_at=now - 4000.0, ended_at=now - 3000.0, pid=None)  # fmt: skip
    took = dlctl_command("status", "-j", str(dead.path)).out.splitlines()[0].split("  ")[2]
    assert took == "took 10m00s"
    play("start", "ready", "forever")
    assert dlctl_command("recover", str(dead.path)).code == 0
    assert (dead.db.run()["ran_s"], dead.db.run()["dead_s"]) == (600.0, 0.0)


def test_the_next_coordinator_is_told_what_was_seen(dead, job, play, dlctl_command):
    """What it makes of that is its own business: the command does not touch its memory."""
    remember(dead, worker_0="quarantined", worker_1="quarantined")
    keep(dead, 0, version=3, deliveries=[])
    dead.daemon("server-0", state="running", phase="serving")
    before = dead.db.memory()
    play("start", "ready", "forever")
    assert dlctl_command("recover", str(dead.path)).code == 0
    assert dead.db.run()["recovery"] == {"served": ["server-0"], "gone": []}
    assert dead.db.memory() == before


def test_from_a_checkpoint_it_begins_with_the_job_as_it_was(dead, job, play, dlctl_command):
    remember(dead, "server-0")
    saved = save(dead, step=30, number=1)
    play("start", "ready", "forever")
    ended = dlctl_command("recover", str(dead.path))
    assert ended.code == 0, ended.err
    assert "60 steps" in ended.rows["result"]
    assert (dead.db.run()["resume"], dead.db.memory()) == (str(saved), {})
    (event,) = [event for event in dead.db.events() if event["kind"] == "resumed"]
    assert re.findall(r"\d+|server-\d", event["text"]) == ["30", "60", "40", "server-0"]


def test_from_a_checkpoint_no_term_comes_again_that_only_the_memory_has(
    dead, job, play, dlctl_command
):
    """The last line of the file is unreadable: the memory is all that tells of its epoch."""
    remember(dead, "server-0")
    dead.db.put_memory({"daemon/worker-0": {"role": "worker", "term": 9}})
    dead.db.commit()
    issue(dead.path, {"worker-0": 8})
    path = dead.path / terms.FILE
    path.write_bytes(path.read_bytes() + b"worker-0=9 76")
    save(dead, step=30, number=1)
    play("start", "ready", "forever")
    ended = dlctl_command("recover", str(dead.path))
    assert (ended.code, dead.db.memory()) == (0, {}), ended.err
    assert terms.newest(dead.path, dead.db) == {"worker-0": 9}


def test_the_events_say_why_a_run_went_back_as_far_as_it_did(
    dead, job, play, dlctl_command, golden
):
    remember(dead, "server-0")
    keep(dead, 0, version=41, deliveries=[])
    save(dead, step=30, number=1, version=20)
    damaged = save(dead, step=60, number=2, version=30)
    (damaged / "shard-0.safetensors").write_bytes(b"cut")
    play("start", "ready", "forever")
    assert dlctl_command("recover", "--from-checkpoint", str(dead.path)).code == 0
    (event,) = [event for event in dead.db.events() if event["kind"] == "resumed"]
    golden("recover-event", event["text"])


def row(state: str, **values: object) -> dict:
    return {"name": "server-0", "state": state, **values}


def snapshot_of(dead, *rows: dict, led: bool = True):
    dead.run(state="running", updated_by=ME["pid_start"] if led else "before", **ME)
    for values in rows:
        dead.db.put_daemon(values["name"], values)
    dead.db.commit()
    return load(dead.path)


def test_a_run_is_back_when_all_daemons_have_reported_to_the_new_coordinator(dead):
    """It takes over that they were running, also of those that died together with it."""
    stopped = snapshot_of(dead, row("stopped"), led=False)
    assert (is_back(stopped), waiting_for(stopped)) == (False, "coordinator (starting)")
    taken_over = snapshot_of(dead, row("running", phase="", metrics={}))
    assert (is_back(taken_over), waiting_for(taken_over)) == (False, "server-0 (no heartbeat yet)")
    dies = snapshot_of(dead, row("backoff"))
    assert (is_back(dies), waiting_for(dies)) == (False, "server-0 (being restarted)")
    worker = {"name": "worker-0", "state": "starting", "phase": "importing torch"}
    waits = row("starting", phase="waiting for the size of the model", waiting_for="worker-0")
    starting = snapshot_of(dead, {**waits, "waiting_since": 5.0}, worker)
    assert (is_back(starting), waiting_for(starting)) == (False, "worker-0 (importing torch)")
    worker = {"name": "worker-0", "state": "quarantined"}
    back = snapshot_of(dead, row("running", phase="serving"), worker)
    assert (is_back(back), waiting_for(back)) == (True, "")


def test_a_wait_is_told_when_the_state_changes_and_every_ten_seconds(capsys, monkeypatch):
    progress = live.ProgressLines()
    for second in range(21):
        monkeypatch.setattr(live.time, "monotonic", lambda now=second: 100.0 + now)
        state = "pending" if second < 5 else "starting"
        progress.phase(state, f"worker-0 (importing torch for {second} s)", second)
    assert capsys.readouterr().err.splitlines() == [
        "pending  waiting for worker-0 (importing torch for 0 s)  0.0s",
        "starting  waiting for worker-0 (importing torch for 5 s)  5.0s",
        "starting  waiting for worker-0 (importing torch for 15 s)  15s",
    ]


def test_a_coordinator_that_dies_at_once_is_an_error_with_its_last_words(
    dead, job, play, dlctl_command
):
    remember(dead, "server-0")
    keep(dead, 0, version=1, deliveries=[])
    play("die")
    ended = dlctl_command("recover", str(dead.path))
    assert ended.code == 7
    assert "RuntimeError: " in ended.err
    assert look(dlctl_command, str(dead.path))["way"] == "go on", "nothing was given up"


def test_only_one_command_brings_a_run_back(dead, dlctl_command):
    remember(dead)
    with lock.claimed(dead.path):
        ended = dlctl_command("recover")
        assert (ended.code, "recover-7f3a" in ended.err) == (1, True)
        assert look(dlctl_command)["way"] == "go on", "who only looks disturbs nobody"


def test_a_coordinator_that_an_agent_has_started_just_now_is_waited_for(
    dead, dlctl_command, monkeypatch
):
    """It has the run already, and is not on record yet."""
    remember(dead)

    def arrives(directory):
        dead.run(state="running", updated_at=time.time(), updated_by=ME["pid_start"], **ME)
        return load(directory)

    monkeypatch.setattr(control, "load", arrives)
    with (dead.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = dlctl_command("recover")
    assert (code, err, look(dlctl_command)["way"]) == (0, "", "alive")


def test_a_coordinator_that_is_not_on_record_is_not_joined_by_another(
    dead, dlctl_command, monkeypatch
):
    monkeypatch.setattr(recover, "LED_S", 0.3)
    remember(dead)
    with (dead.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = dlctl_command("recover")
    assert (ended.code, ended.where.endswith("/lock")) == (1, True)


# ---------------------------------------------------------------- directories


def test_a_damaged_database_is_named(dead, dlctl_command):
    dead.db.close()
    path = dead.path / database.FILE
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    Path("job.toml").write_text('[job]\nname = "recover"\n')
    ended = dlctl_command("recover", str(dead.path))
    assert (ended.code, ended.next) == (1, "dlctl start --fresh job.toml")


@pytest.mark.parametrize("table", ["metric", "memory"])
def test_a_damaged_page_is_found_although_an_agent_lives(dead, dlctl_command, monkeypatch, table):
    """It starts a coordinator again that may end at once for that."""
    monkeypatch.setattr(recover, "LED_S", 0.1)
    dead.daemon("agent-0", **ME)
    dead.db.close()
    damaged_page(dead.path, table)
    for command in (("recover",), ("recover", "--dry-run"), ("recover", "--from-checkpoint")):
        ended = dlctl_command(*command)
        assert (ended.code, ended.where.endswith(database.FILE)) == (1, True), ended.out


def test_a_write_ahead_log_that_was_cut_off_costs_its_last_rows_only(dead, dlctl_command):
    """What the coordinator remembered stands before the cut: the run goes on with that."""
    remember(dead)
    dead.run(step=99, reason="the last transaction")
    wal = dead.path / f"{database.FILE}-wal"
    data = wal.read_bytes()
    whole = (dead.path / database.FILE).read_bytes()
    dead.db.close()
    (dead.path / database.FILE).write_bytes(whole)
    wal.write_bytes(data[:-100])
    assert look(dlctl_command)["way"] == "go on"
    with closing(RunDb(dead.path, readonly=True)) as db:
        run, memory = db.run(), db.memory()
    assert (run["state"], run["step"], "reason" in run) == ("running", 88, False)
    assert memory["work"][0] == 90


LOOKING = [("status",), ("why",), ("logs", "--failed"), ("events",), ("verify",)]


@pytest.mark.parametrize("command", [("recover",), ("recover", "--dry-run"), ("stop",), *LOOKING])
def test_terms_that_are_damaged_before_their_end_are_named(dead, dlctl_command, command):
    """One could be given out again. Who only looked would say that nothing is lost, when recover
    had refused already.
    """
    remember(dead)
    keep(dead, 0, version=41, deliveries=[])
    save(dead, step=30, number=1)
    path = damaged_terms(dead.path)
    data = path.read_bytes()
    dead.db.close()
    ended = dlctl_command(*command, "-j", str(dead.path))
    assert (ended.code, ended.out) == (1, "")
    assert "line 2 " in ended.err
    (way,) = commands_of(ended.err)
    assert way.startswith("dlctl start --from runs/")
    assert path.read_bytes() == data
    assert " unreadable " in dlctl_command("ps").out


def test_the_terms_of_a_run_that_lives_are_not_read(dead, monkeypatch):
    """Its coordinator sees to them."""
    looked = []
    monkeypatch.setattr(terms, "damage", lambda directory: looked.append(directory) or "")
    dead.run(**ME)
    assert (load(dead.path).is_live, looked) == (True, [])
    dead.run(**gone())
    assert (load(dead.path).is_live, looked) == (False, [dead.path])


def test_a_copy_is_refused_whether_or_not_the_run_lives(dead, dlctl_command):
    copy = dead.path.parent.parent / "copies" / dead.path.name
    shutil.copytree(dead.path, copy)
    for command in (("recover",), ("recover", "--dry-run")):
        ended = dlctl_command(*command, str(copy))
        assert (ended.code, ended.where) == (1, str(copy))
        assert ended.next == f"dlctl status -j {dead.path}"


def test_a_run_that_was_restored_goes_back_to_its_checkpoint(dead, dlctl_command):
    remember(dead)
    save(dead, step=30, number=1)
    moved = dead.path.parent.parent / "moved" / dead.path.name
    shutil.copytree(dead.path, moved)
    shutil.rmtree(dead.path)
    found = look(dlctl_command, str(moved))
    assert found["way"] == "resume"
    assert len(found["obstacles"]) == 1


def test_a_copy_is_told_how_a_new_run_goes_on_from_its_checkpoint(dead, dlctl_command):
    save(dead, step=30, number=1)
    copy = dead.path.parent.parent / "copies" / dead.path.name
    shutil.copytree(dead.path, copy)
    look_on, start = commands_of(dlctl_command("recover", str(copy)).err)
    assert look_on == f"dlctl status -j {dead.path}"
    assert start.startswith("dlctl start --from ")


def test_a_run_that_was_moved_on_its_file_system_is_itself(dead, dlctl_command):
    remember(dead)
    place = dead.path.parent.parent / "moved"
    place.mkdir()
    dead.path.rename(place / dead.path.name)
    assert look(dlctl_command, str(place / dead.path.name))["way"] == "go on"


def test_a_directory_under_another_name_is_refused(dead, dlctl_command):
    other = dead.path.with_name("another-0000")
    dead.path.rename(other)
    ended = dlctl_command("recover", str(other))
    assert (ended.code, '"another-0000"' in ended.err) == (1, True)


def test_a_copy_under_another_name_is_not_told_to_take_the_place_of_its_run(dead, dlctl_command):
    remember(dead)
    copy = dead.path.with_name("recover-copy1")
    shutil.copytree(dead.path, copy)
    for place in (dead.path, dead.path.parent.parent / dead.path.name):
        dead.path.rename(place)
        paths.register(place)
        code, _, err = dlctl_command("recover", str(copy))
        assert code == 1
        assert commands_of(err) == [f"dlctl status -j {place}"]
        place.rename(dead.path)


# ---------------------------------------------------------------- start


@pytest.fixture
def begun(job, play, own_place, dlctl_command) -> Iterator[RunDb]:
    """The database of a run that was started from the job file and whose coordinator died."""
    play("start", "ready", "forever")
    assert dlctl_command("start", str(job)).code == 0
    (directory,) = (own_place / "runs").iterdir()
    with closing(RunDb(directory)) as db:
        process = psutil.Process(db.run()["pid"])
        process.kill()
        process.wait()
        db.put_run(step=90, incarnation=1)
        db.put_daemon("worker-0", {"name": "worker-0", "role": "worker", "state": "running"})
        db.put_memory({"run": ["running", "", 3.0], "work": [90, 1, 0.5, 64, [0, 0], None]})
        db.commit()
        yield db


def test_a_run_that_is_down_is_not_saved_and_what_goes_on_with_it_is_said(
    begun, own_place, dlctl_command, golden
):
    ended = dlctl_command("checkpoint")
    assert (ended.code, ended.next) == (1, f"dlctl recover -j {begun.run()['run_id']}")
    golden("checkpoint-failed", ended.err)


def test_start_goes_on_where_a_dead_run_was_if_nothing_is_lost(begun, job, dlctl_command):
    assert dlctl_command("status").next == f"dlctl recover -j {begun.run()['run_id']}"
    ended = dlctl_command("start", str(job))
    assert ended.code == 0, ended.err
    assert " step 90" in ended.err
    assert begun.memory()["work"][0] == 90
    assert begun.run()["incarnation"] == 2


def changed(job) -> None:
    job.write_text(job.read_text().replace("lr = 0.1", "lr = 0.2"))


def test_start_with_another_content_takes_the_checkpoint_and_says_what_that_costs(
    begun, job, own_place, dlctl_command
):
    (directory,) = (own_place / "runs").iterdir()
    save(SimpleNamespace(path=directory), step=30, number=1)
    changed(job)
    assert json.loads(dlctl_command("plan", "--json", str(job)).out)["done_again"] == 60
    ended = dlctl_command("start", str(job))
    assert ended.code == 0, ended.err
    assert "60 steps" in ended.err
    assert begun.run()["resume"].endswith("000000000030-1")


@pytest.mark.parametrize("is_saved", [False, True])
def test_start_with_another_content_does_not_give_up_a_run_that_has_no_good_checkpoint(
    begun, job, own_place, dlctl_command, is_saved
):
    (directory,) = (own_place / "runs").iterdir()
    if is_saved:
        saved = save(SimpleNamespace(path=directory), step=30, number=1)
        (saved / "shard-0.safetensors").write_bytes(b"cut")
    changed(job)
    code, _, err = dlctl_command("start", str(job))
    assert (code, commands_of(err)[-1]) == (1, "dlctl start --fresh job.toml")
    if not is_saved:
        assert json.loads(dlctl_command("plan", "--json", str(job)).out)["way"] == "kept"
        assert "  optimizer.lr: 0.1 -> 0.2\n" in err
        assert commands_of(err)[0] == f"dlctl recover -j {directory.name}"
    assert (len(list((own_place / "runs").iterdir())), begun.memory()["work"][0]) == (1, 90)
    assert dlctl_command("start", "--fresh", str(job)).code == 0
    assert len(list((own_place / "runs").iterdir())) == 2


def test_a_resume_that_cannot_be_written_leaves_a_run_that_can_go_on(begun, job, dlctl_command):
    """A real limit on file sizes, in a process of its own."""
    (directory,) = (job.parent / "runs").iterdir()
    run = SimpleNamespace(path=directory, db=begun)
    save(run, step=30, number=1)
    remember(run, "server-0")
    state = keep(run, 0, version=1, deliveries=[])
    job.write_text(job.read_text().replace("lr = 0.1", "lr = 0.2"))
    code = """
import resource, sys
from dlctl.cli import app as main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main.run(["start", "job.toml"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert state.exists()
    assert look(dlctl_command)["way"] == "go on"
    kept_shards.remove(directory, config.Servers())


def test_start_waits_for_no_other_command_that_brings_the_run_back(begun, job, dlctl_command):
    with lock.claimed(job.parent / "runs" / begun.run()["run_id"]):
        ended = dlctl_command("start", str(job))
    assert (ended.code, begun.run()["run_id"] in ended.err) == (1, True)
    assert begun.run()["incarnation"] == 1


def test_what_was_killed_on_purpose_is_not_brought_back(begun, dlctl_command):
    assert dlctl_command("stop", "--kill").code == 0
    run = begun.run()
    assert (run["state"], run["reason"]) == ("stopped", KILLED)
    assert look(dlctl_command)["way"] == "over"


def test_what_stop_has_cleaned_up_after_can_still_be_recovered(begun, dlctl_command):
    ended = dlctl_command("stop")
    assert (ended.code, ended.next) == (0, f"dlctl recover -j {begun.run()['run_id']}")
    assert look(dlctl_command)["way"] == "go on"


def test_without_a_lost_host_is_said_alike_everywhere(dead, job, dlctl_command):
    run = with_a_host_that_is_lost(dead).run(state="failed", step=88, job_file=str(job))
    run.daemon("agent-1", agent="agent-1", state="failed")
    remember(run, "server-0", state="failed")
    without = "without: remove nowhere.invalid from job.toml, then dlctl start job.toml starts over"
    assert without in flat(dlctl_command("status").out)
    code, _, err = dlctl_command("recover")
    assert (code, without in flat(err)) == (5, True)


def test_a_run_is_killed_although_a_host_of_it_is_lost_for_good(dead, dlctl_command, golden):
    run = with_a_host_that_is_lost(dead)
    state = keep(run, 0, version=1, deliveries=[])
    ended = dlctl_command("stop", "--kill")
    assert (ended.code, state.exists()) == (8, False)
    assert "nowhere.invalid" in ended.err
    assert (run.db.run()["state"], run.db.run()["reason"]) == ("stopped", KILLED)
