"""`why`, and what is found of a coordinator that is gone, silent, or cannot write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
from process_identity import ME, OF_ANOTHER_BOOT, identity

from dlctl.runs import paths

pytestmark = pytest.mark.usefixtures("clock_stands")


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    made.run(state="running", updated_at=time.time() + 60, waiting="", **ME)
    return made


SCREENS = ("status", "why", "ps", "logs --failed")


def together(screens: dict[str, Any]) -> str:
    """What each command has shown, below it."""
    return "\n".join(f"$ dlctl {name}\n{ended.out}" for name, ended in screens.items())


def first(dlctl_command) -> dict:
    """The first problem of the run; it is the first cause, too."""
    found = json.loads(dlctl_command("status", "--json").out)["problems"]
    causes = json.loads(dlctl_command("why", "--json").out)["causes"]
    assert causes[0]["code"] == found[0]["code"]
    return found[0]


def test_in_a_healthy_run_nobody_waits(run, dlctl_command, golden):
    run.daemon("worker-0", phase="computing")
    said = [dlctl_command("why", *of) for of in ([], ["worker-0"], ["coordinator"])]
    assert {(ended.code, ended.err) for ended in said} == {(0, "")}
    golden("why-nothing", "".join(ended.out for ended in said))


def test_the_forest_has_the_root_first_and_below_it_all_who_wait(run, dlctl_command, golden):
    run.daemon("server-0").daemon("worker-0").daemon("worker-1").daemon("worker-2")
    run.problem("worker-stuck", "worker-2", phase="in one batch for 13 s")
    run.problem("daemon-waiting", "server-0", waiting_for="worker-2", phase="serving")
    for name in ("worker-0", "worker-1"):
        run.problem("daemon-waiting", name, waiting_for="server-0", phase="pushing")
    golden("why-forest", dlctl_command("why").out)
    assert dlctl_command("why", "worker-0").out.startswith("worker-2: ")


def test_of_a_ring_the_first_is_the_root(run, dlctl_command):
    run.problem("daemon-waiting", "worker-0", waiting_for="worker-1")
    run.problem("daemon-waiting", "worker-1", waiting_for="worker-0")
    assert dlctl_command("why").out.splitlines() == [
        "worker-0: waits for worker-1", "└─ worker-1: waits for worker-0",
    ]  # fmt: skip


def test_a_problem_of_somebody_else_is_not_shown(run, dlctl_command):
    run.daemon("worker-0", phase="computing")
    run.problem("worker-stuck", "worker-1", phase="x")
    run.problem("rate-limit", "run", direction="push", limit_bytes_per_s=5e6, workers="worker-2")
    assert "worker-1" not in dlctl_command("why", "worker-0").out
    assert "5 MB/s" in dlctl_command("why", "worker-2").out


def test_a_frozen_coordinator_is_not_answering_everywhere(run, dlctl_command, monkeypatch, golden):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as frozen:
        old = {"updated_at": time.time() - 44.4, "samples_per_s": 3549.0}
        run.run(**old, **identity(frozen.pid)).daemon("agent-0", **ME)
        run.daemon("worker-0", metrics={"samples_per_s": 80.0, "push_bytes_per_s": 5e6})
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        screens = {command: dlctl_command(*command.split()) for command in SCREENS}
        assert dlctl_command("status", "--check").code == 3
        frozen.kill()
    assert [screens[name].next for name in ("status", "why")] == [f"kill -9 {frozen.pid}"] * 2
    golden("coordinator-frozen", together(screens))


@pytest.mark.parametrize(
    ("name", "free_bytes", "step"),
    [
        ("full", 0, "df -h runs"),
        ("writable", 10**12, "dlctl logs coordinator -l warning -j digits-7f3a"),
    ],
)
def test_a_coordinator_that_works_and_cannot_write_is_not_silent(
    run, dlctl_command, monkeypatch, golden, name, free_bytes, step
):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as at_work:
        run.run(updated_at=time.time() - 44.4, **identity(at_work.pid)).daemon("agent-0", **ME)
        run.daemon("worker-0", **(ME | {"pid_start": OF_ANOTHER_BOOT})).daemon("worker-1", **ME)
        (run.path / paths.LOCK).touch()
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        usage = shutil.disk_usage(run.path)._replace(free=free_bytes)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        screens = {command: dlctl_command(*command.split()) for command in SCREENS}
        assert first(dlctl_command)["code"] == "coordinator-unwritable"
        checked = dlctl_command("status", "--check")
        os.utime(run.path / paths.LOCK, (time.time() - 22, time.time() - 22))
        assert first(dlctl_command)["code"] == "coordinator-silent"
        golden(f"silent-{name}", dlctl_command("why").out)
        at_work.kill()
    assert (screens["status"].next, screens["why"].next) == (step, step)
    shown = together(screens)
    assert "kill" not in shown
    assert (checked.code, "coordinator" in checked.err) == (3, True)
    golden(f"unwritable-{name}", shown)


def refuse(monkeypatch) -> None:
    """As ext4 does after an error: it can be read, and that is all."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refused)


def test_where_not_even_a_lock_can_be_touched_the_disk_is_to_blame_and_not_the_coordinator(
    run, dlctl_command, monkeypatch
):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as at_work:
        run.run(updated_at=time.time() - 44.4, **identity(at_work.pid)).daemon("agent-0", **ME)
        run.daemon("worker-0", **ME)
        (run.path / paths.LOCK).touch()
        os.utime(run.path / paths.LOCK, (time.time() - 44, time.time() - 44))
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        refuse(monkeypatch)
        found = first(dlctl_command)
        at_work.kill()
    assert (found["code"], found["facts"]["cause"]) == ("coordinator-unwritable", "read-only")
    assert found["facts"]["why"].endswith(os.strerror(errno.EROFS))
    assert found["next"].startswith("findmnt -T runs")


def test_whose_agent_may_not_be_able_to_start_a_coordinator_on_such_a_disk_hears_that(
    run, dlctl_command, monkeypatch
):
    run.run(updated_at=time.time() - 5, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    refuse(monkeypatch)
    found = first(dlctl_command)
    assert (found["code"], found["facts"]["cause"]) == ("coordinator-gone", "read-only")
    assert found["facts"]["why"].endswith(os.strerror(errno.EROFS))
    assert "findmnt -T runs " in found["next"]
    assert "dlctl recover -j digits-7f3a" in found["next"]


def test_a_coordinator_that_has_yet_to_say_its_first_word_is_starting(run, dlctl_command):
    run.run(updated_by=OF_ANOTHER_BOOT, incarnation=2)
    assert first(dlctl_command)["code"] == "coordinator-restarting"
    run.run(updated_by=ME["pid_start"])
    assert json.loads(dlctl_command("why", "--json").out)["causes"] == []


def test_a_dead_coordinator_is_the_root(run, dlctl_command, golden):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    run.run(updated_at=time.time() - 12.3, **gone).daemon("agent-0", **ME)
    found = first(dlctl_command)
    assert found["facts"] == {
        "incarnation": 0, "pid": dead.pid, "cause": "restarts", "agent": "its agent",
    }  # fmt: skip
    run.daemon("agent-0", **gone).daemon("worker-0", **gone)
    found = first(dlctl_command)
    assert found["facts"] == {"incarnation": 0, "pid": dead.pid}
    assert found["next"].startswith("dlctl start JOBFILE")
    golden("coordinator-dead", dlctl_command("why").out)


def test_recover_leaves_a_coordinator_alone_that_works_and_cannot_write(
    run, dlctl_command, monkeypatch
):
    """A successor that has put its pid on record before the disk was full."""
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0)
    run.run(updated_at=time.time() - 44.4, updated_by=OF_ANOTHER_BOOT, incarnation=2)
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    for command in (("recover", "--dry-run"), ("recover",), ("recover", "--from-checkpoint")):
        code, _, err = dlctl_command(*command)
        assert (code, json.loads(dlctl_command(*command, "--json").out)["way"]) == (0, "alive"), err


def test_a_full_disk_is_told_of_before_anybody_waits_for_it(run, dlctl_command, monkeypatch):
    usage = shutil.disk_usage(run.path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    found = first(dlctl_command)
    assert (found["code"], dlctl_command("why").next) == ("disk-full", "df -h runs")


def test_for_how_long_a_coordinator_is_gone_is_seen_by_its_lock(run, dlctl_command):
    """On a full disk it writes nothing, and touches that as long as it lives."""
    run.run(updated_at=time.time() - 44.4, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    os.utime(run.path / paths.LOCK, (time.time() - 8.1, time.time() - 8.1))
    assert dlctl_command("why").out.split()[4].startswith("8.")


def test_a_coordinator_that_cannot_write_that_it_is_there_is_told_of(
    run, dlctl_command, monkeypatch
):
    run.run(updated_at=time.time() - 44.4, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME).daemon("server-0", **ME).daemon("worker-0", **ME)
    usage = shutil.disk_usage(run.path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with (run.path / paths.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = first(dlctl_command)
    assert (found["code"], found["facts"]["cause"]) == ("coordinator-unwritable", "full")
    assert dlctl_command("why").next == "df -h runs"


def test_an_ended_run_has_nobody_who_waits_and_says_how_it_goes_on(run, dlctl_command, golden):
    run.run(state="failed", reason="server-0: boom")
    code, out, _ = dlctl_command("why")
    assert code == 0
    golden("why-ended", out)
    assert dlctl_command("why", "worker-9").code == 4


def test_rows_of_another_version_do_no_harm(run, dlctl_command):
    run.problem("worker-stuck", "\x1b[2Jserver-0", phase="\x1b[2J")
    run.problem("daemon-waiting", "worker-0", waiting_for=7).problem("of-tomorrow", "worker-1")
    code, out, _ = dlctl_command("why")
    assert (code, "\x1b" in out) == (0, False)
