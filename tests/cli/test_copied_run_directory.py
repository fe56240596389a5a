"""Commands on a copy of a run directory are refused and reach no process of the run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dead_runs import keep, remember, save
from fake_coordinator import coordinator, done
from next_step_lines import commands_of
from process_identity import identity

from dlctl.control import keys
from dlctl.job import config
from dlctl.runs import database, kept_shards, lock, paths

ACTING = [
    ("stop",), ("stop", "--no-checkpoint"), ("stop", "--kill"), ("scale", "worker=3"),
    ("restart", "worker-0", "-d"), ("set", "worker-0", "push=off"), ("checkpoint",),
    ("checkpoint", "create"), ("keys", "rotate", "-d"), ("recover",),
]  # fmt: skip
STOPPING = [("stop",), ("stop", "--kill")]


def gone() -> dict:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        return identity(dead.pid)


@pytest.fixture
def run(run_directory) -> Iterator:
    """A run that should live, and whose coordinator has died."""
    made = run_directory("copied-7f3a", servers=1, workers=2)
    place = lock.place(made.path)
    made.run(state="running", step=88, place=place, **gone())
    keys.renew(made.path)
    yield made
    kept_shards.remove(made.path, config.Servers())


@pytest.fixture
def living(run, daemon):
    """The same, and its coordinator and its daemons live."""
    run.run(**daemon("coordinator", run.path))
    for name in ("agent-0", "server-0", "worker-0", "worker-1"):
        run.daemon(name, incarnation=1, **daemon(name, run.path))
    return run


def copied(run) -> Path:
    """A copy of the run's directory as it is now, under the same name."""
    copy = run.path.parent.parent / "copies" / run.path.name
    shutil.copytree(run.path, copy)
    return copy


def content(directory: Path) -> dict[Path, bytes]:
    """All that lies in a directory, but for what SQLite makes for those who read."""
    found = (p for p in directory.rglob("*") if p.is_file() and not p.name.endswith("-shm"))
    return {path: path.read_bytes() for path in found}


def socket(run) -> Path:
    path = paths.socket_dir(run.path.name) / "server-0"
    path.touch()
    return path


@pytest.mark.parametrize("command", ACTING, ids=" ".join)
def test_who_acts_on_a_copy_does_not_reach_the_run(living, dlctl_command, command):
    with coordinator(lambda q, n: [done(q)]) as (address, heard):
        living.run(control=address)
        copy = copied(living)
        before = content(living.path), content(copy)
        code, out, err = dlctl_command(*command, "-j", str(copy))
        assert (content(living.path), content(copy)) == before
    assert (code, out, heard) == (1, "", [])
    assert err.endswith(f"\n  --> {copy}\n  next: dlctl status -j {living.path}\n")


@pytest.mark.parametrize("command", STOPPING, ids=" ".join)
def test_a_copy_of_before_its_coordinator_was_replaced_ends_nobody(
    run, daemon, dlctl_command, command
):
    """What the copy knows of the coordinator is old, and of the others it is not."""
    server = daemon("server-0", run.path)
    run.daemon("server-0", **server)
    copy, path = copied(run), socket(run)
    run.run(**daemon("coordinator", run.path))
    code, _, err = dlctl_command(*command, "-j", str(copy))
    assert (code, "server-0" in err, str(run.path) in err) == (1, True, True), err
    assert (identity(server["pid"]), path.exists()) == (server, True)


@pytest.mark.parametrize("command", STOPPING, ids=" ".join)
def test_a_copy_of_before_everybody_was_replaced_takes_nothing_away(
    run, daemon, dlctl_command, command
):
    copy, path, state = copied(run), socket(run), keep(run, 0, version=1, deliveries=[])
    run.run(**daemon("coordinator", run.path))
    code, _, err = dlctl_command(*command, "-j", str(copy))
    assert (code, str(run.path) in err) == (1, True), err
    assert (path.exists(), state.exists()) == (True, True)


def test_to_kill_a_copy_of_a_dead_run_leaves_what_it_can_go_on_from(run, dlctl_command):
    remember(run, "server-0")
    state = keep(run, 0, version=41, deliveries=[])
    (paths.index_dir() / run.path.name).unlink()
    code, _, err = dlctl_command("stop", "--kill", "-j", str(copied(run)))
    assert (code, state.exists()) == (1, True), err
    found = dlctl_command("recover", "--dry-run", "--json", "-j", str(run.path))
    assert json.loads(found.out)["way"] == "go on"


def test_a_copy_of_an_ended_run_takes_nothing_from_the_run_that_goes_on(run, dlctl_command):
    run.run(state="stopped")
    copy, path, state = copied(run), socket(run), keep(run, 0, version=1, deliveries=[])
    for command in STOPPING:
        assert dlctl_command(*command, "-j", str(copy)).code == 1
    assert (path.exists(), state.exists()) == (True, True)


def test_a_copy_whose_database_cannot_be_read_is_one_as_well(run, dlctl_command):
    copy, path, state = copied(run), socket(run), keep(run, 0, version=1, deliveries=[])
    (copy / database.FILE).write_bytes(b"not a database" * 1000)
    code, _, err = dlctl_command("stop", "--kill", "-j", str(copy))
    assert (code, str(run.path) in err) == (1, True), err
    assert (path.exists(), state.exists()) == (True, True)


def test_a_copy_of_a_run_that_was_moved_afterwards_is_one_as_well(run, dlctl_command):
    copy, state = copied(run), keep(run, 0, version=1, deliveries=[])
    there = run.path.parent.parent / "there" / run.path.name
    there.parent.mkdir()
    run.path.rename(there)
    paths.register(there)
    code, _, err = dlctl_command("stop", "--kill", "-j", str(copy))
    assert (code, str(there) in err) == (1, True), err
    assert state.exists()


def test_a_copy_beside_its_run_has_another_name_and_does_not_reach_it(living, dlctl_command):
    copy = living.path.with_name("copied-copy")
    with coordinator(lambda q, n: [done(q)]) as (address, heard):
        living.run(control=address)
        shutil.copytree(living.path, copy)
        code, _, err = dlctl_command("stop", "-j", str(copy))
    assert (code, heard, "  --> " in err) == (1, [], True), err


def test_what_is_left_of_a_living_run_whose_directory_was_removed_is_a_copy(living, dlctl_command):
    """It ends by itself then."""
    copy = copied(living)
    shutil.rmtree(living.path)
    code, _, err = dlctl_command("stop", "-j", str(copy))
    assert (code, f"next: pgrep -af {living.path}\n" in err) == (1, True), err


def test_nobody_is_given_a_key_that_a_copy_has(run, own_place, dlctl_command):
    """The run itself may have another one by now."""
    run.run(control="tcp://127.0.0.1:9", control_key="x" * keys.KEY_LETTERS)
    assert dlctl_command("keys", "reader", "bob.key", "-j", str(copied(run))).code == 1
    assert not (own_place / "bob.key").exists()


# ---------------------------------------------------------------- what is no copy


def test_a_run_is_itself_wherever_its_directory_was_moved_to(living, dlctl_command):
    with coordinator(lambda q, n: [done(q, before=2, after=2)]) as (address, heard):
        living.run(control=address)
        there = living.path.parent.parent / "there" / living.path.name
        there.parent.mkdir()
        living.path.rename(there)
        (living.path / "ckpt").mkdir(parents=True)  # The coordinator has saved since.
        assert dlctl_command("scale", "worker=2", "-j", str(there)).code == 0
        code, _, err = dlctl_command("recover", "-j", str(there))
    assert [request.verb for request in heard] == ["scale"]
    assert (code, f"\n  --> {there}\n" in err) == (1, True), err
    assert f"next: dlctl stop -j {there}\n" in err


def test_a_daemon_of_another_host_works_elsewhere_by_rights(
    living, daemon, dlctl_command, tmp_path
):
    """A second host may be this machine, by another name."""
    living.daemon("worker-1", agent="agent-1", **daemon("worker-1", tmp_path))
    with coordinator(lambda q, n: [done(q, before=2, after=2)]) as (address, heard):
        living.run(control=address)
        code, _, err = dlctl_command("scale", "worker=2")
    assert (code, len(heard)) == (0, 1), err


# ---------------------------------------------------------------- who only looks


def test_who_looks_at_a_copy_of_what_lives_is_sent_to_the_run(living, dlctl_command, monkeypatch):
    copy = copied(living)
    monkeypatch.chdir(copy.parent)
    (copy.parent / "runs").symlink_to(".")
    for command in (("status",), ("why",), ("get",), ("events",), ("logs",), ("logs", "--failed")):
        code, out, err = dlctl_command(*command, "-j", str(copy))
        assert (code, out, commands_of(err)) == (1, "", [f"dlctl status -j {living.path}"]), command
    assert dlctl_command("status", "-j", str(living.path)).code == 0


def test_a_copy_of_an_ended_run_can_be_kept_and_thinned_out(run, dlctl_command):
    run.run(state="stopped")
    for number in (1, 2):
        save(run, step=30 * number, number=number)
    copy = copied(run)
    code, _, err = dlctl_command("status", "-j", str(copy))
    assert (code, commands_of(err)[0]) == (1, f"dlctl status -j {run.path}")
    assert dlctl_command("checkpoint", "prune", "--keep", "1", "-j", str(copy)).code == 0
    assert (len([*copy.glob("ckpt/*-*")]), len([*run.path.glob("ckpt/*-*")])) == (1, 2)


def test_a_copy_that_was_damaged_in_the_copying_is_sent_to_the_run(living, dlctl_command):
    """A run that is written while it is copied: its own database is well, and it has the shards."""
    copy = copied(living)
    (copy / "run.db").write_bytes(b"torn" * 4096)
    for command in (("recover",), ("recover", "--dry-run"), ("status",), ("why",)):
        code, out, err = dlctl_command(*command, "-j", str(copy))
        assert (code, out) == (1, ""), err
        assert str(living.path) in err
        assert err.endswith(f"\n  next: dlctl status -j {living.path}\n")
        assert "--kill" not in err
        assert "--fresh" not in err


def test_in_a_copied_project_only_its_id_means_the_run(living, dlctl_command, monkeypatch):
    copy = living.path.parent.parent / "copies" / "runs" / living.path.name
    shutil.copytree(living.path, copy)
    monkeypatch.chdir(copy.parent.parent)
    code, out, err = dlctl_command("status", "--json", "-j", living.path.name)
    assert (code, json.loads(out)["directory"]) == (0, str(living.path)), err
    code, _, err = dlctl_command("status")
    assert (code, commands_of(err)) == (1, [f"dlctl status -j {living.path}"])


@pytest.mark.parametrize("command", [("stop",), ("recover",), ("scale", "worker=3")], ids=" ".join)
@pytest.mark.parametrize("words", [(), ("-j", "copied")], ids=" ".join)
def test_who_acts_beside_a_copy_does_not_reach_another_project(
    living, dlctl_command, monkeypatch, command, words
):
    """In a copied project its user means what lies there. An id is that of just one run."""
    place = living.path.parent.parent / "copies"
    shutil.copytree(living.path, place / "runs" / living.path.name)
    with coordinator(lambda q, n: [done(q, before=2, after=2)]) as (address, heard):
        living.run(control=address)
        monkeypatch.chdir(place)
        (place / "copied").mkdir()  # Its name is the job's, and it is no run.
        code, out, err = dlctl_command(*command, *words)
        assert (code, out, heard) == (1, "", [])
        assert str(living.path) in err
        assert dlctl_command("scale", "worker=2", "-j", living.path.name).code == 0
    assert [request.verb for request in heard] == ["scale"]


def test_checkpoints_are_not_removed_in_another_project(living, dlctl_command, monkeypatch):
    for number in (1, 2):
        save(living, step=30 * number, number=number)
    place = living.path.parent.parent / "copies"
    shutil.copytree(living.path, place / "runs" / living.path.name)
    monkeypatch.chdir(place)
    assert dlctl_command("checkpoint", "prune", "--keep", "1").code == 0
    counts = [len([*where.glob("ckpt/*-*")]) for where in (living.path, *place.glob("runs/*"))]
    assert counts == [2, 1]


def test_a_backup_beside_its_run_is_never_meant(run, dlctl_command):
    """It was made last, so that it looks like the newest run of the job."""
    file = run.path.parent.parent / "job.toml"
    file.touch()
    run.run(state="stopped", step=88, job_file=str(file))
    for number in (1, 2):
        save(run, step=30 * number, number=number)
    backup = run.path.with_name("backup")
    shutil.copytree(run.path, backup)
    (backup / "job.json").touch()
    for words in ((), ("-j", "copied"), ("-j", "job.toml")):
        assert json.loads(dlctl_command("status", "--json", *words).out)["run_id"] == run.path.name
    assert dlctl_command("status", "-j", str(backup)).code == 1
    assert dlctl_command("checkpoint", "prune", "--keep", "1", "-j", "job.toml").code == 0
    assert [len([*place.glob("ckpt/*-*")]) for place in (run.path, backup)] == [1, 2]
    assert dlctl_command("stop").code == 0


def test_ps_lists_no_copy(living, dlctl_command, monkeypatch):
    copy = living.path.parent.parent / "copies" / "runs" / living.path.name
    shutil.copytree(living.path, copy)
    monkeypatch.chdir(copy.parent.parent)
    code, out, _ = dlctl_command("ps", "--json")
    states_of = {run["directory"]: run["state"] for run in json.loads(out)["runs"]}
    assert (code, states_of) == (0, {str(living.path): "running"})
