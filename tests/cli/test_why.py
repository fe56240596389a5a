"""`why`: rows of databases made by hand, and the sentences that come of them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
from identity import ME, OF_ANOTHER_BOOT, identity
from nextlines import flat

from dlctl.ops import problems, recover
from dlctl.runs import paths, takeovers
from dlctl.util.text import NO_USE

pytestmark = pytest.mark.usefixtures("clock_stands")


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    made.run(state="running", updated_at=time.time() + 60, waiting="", **ME)
    return made


def worker(run, index: int, **values):
    now = time.time()
    made = {"phase": "computing", "updated_at": now, "waiting_since": None, **values}
    since = made.pop("waits_s", None)
    if since is not None:
        made["waiting_since"] = now - since
    run.daemon(f"worker-{index}", **made)


def test_in_a_healthy_run_nobody_waits(run, dlctl_command):
    run.daemon("server-0", phase="serving")
    worker(run, 0, metrics={"samples_per_s": 80.0})
    worker(run, 1, waiting_for="server-0", waits_s=0.3)
    steps = {"samples_per_s": 80.0}
    worker(run, 2, phase="fetching", waiting_for="server-0", waits_s=40, metrics=steps)
    code, out, err = dlctl_command("why")
    assert (code, out, err) == (0, "nobody waits: digits-7f3a is running\n", "")
    one = dlctl_command("why", "worker-0").out
    assert one == "worker-0 waits for nobody: digits-7f3a is running\n  worker-0: computing\n"


def test_the_slowest_worker_of_a_barrier_is_the_root(run, dlctl_command):
    run.daemon(
        "server-0", phase="serving", waiting_for="worker-2", waiting_since=time.time() - 12.2,
        updated_at=time.time(),
    )  # fmt: skip
    for index in (0, 1):
        worker(run, index, phase="pushing", waiting_for="server-0", waits_s=11.1)
    worker(run, 2, state="slow", phase="in one batch for 13 s", metrics={"stuck_s": 13.0})
    out = dlctl_command("why").out.splitlines()
    assert out[0] == "worker-2 is slow: in one batch for 13 s"
    assert out[1] == "   next: dlctl restart worker-2 -j digits-7f3a"
    assert out[2] == "└─ server-0 waits for it, for 12s: serving"
    assert out[3] == "   └─ worker-0 waits for it, for 11s: pushing"
    assert out[4] == "   └─ worker-1 waits for it, for 11s: pushing"
    assert len(out) == 5


def test_a_server_that_is_started_again_is_the_root_of_all_who_wait_for_it(run, dlctl_command):
    last = {"code": -9, "text": "killed by SIGKILL", "at": time.time() - 3, "last_lines": []}
    run.daemon("server-0", state="backoff", retry_at=time.time() + 3599, last_exit=last)
    worker(run, 0, phase="fetching", waiting_for="server-0", waits_s=3)
    data = json.loads(dlctl_command("why", "--json").out)
    assert data["schema"] == "dlctl.why/1"
    (root,) = data["causes"]
    assert root["name"] == "server-0"
    assert root["what"] == (
        "was killed by SIGKILL 3.0s ago; a new one starts in 59m59s; it goes on with its shard"
    )
    assert root["since"].endswith("Z")
    assert [child["name"] for child in root["waiting"]] == ["worker-0"]
    assert dlctl_command("why", "worker-1").out.startswith("worker-1 waits for nobody")
    assert "server-0" in dlctl_command("why", "worker-0").out


@pytest.mark.parametrize(
    ("before", "how"),
    [
        (("state", "", "running"), "died"),
        (("restart", "coordinator", "it has a new key"), "was restarted on request"),
        (("restart", "worker-0", "worker-0 is restarted"), "died"),
        (("state", "", "failed: a host is gone"), "was brought back"),
    ],
)
def test_a_coordinator_is_said_to_be_dead_only_if_it_died(before, how):
    rows = [("state", "", "starting"), before, ("recover", "coordinator", "it is back")]
    events = [
        {"at": float(at), "kind": kind, "daemon": daemon, "text": text, "data": {}}
        for at, (kind, daemon, text) in enumerate(rows)
    ]
    assert takeovers.of(events).takeover == how


def test_a_coordinator_that_died_a_moment_ago_is_told_of_as_any_other_daemon(run, dlctl_command):
    now = time.time()
    run.run(incarnation=2, updated_by=ME["pid_start"])
    run.event(now - 9, "state", "", "running").event(
        now - 3, "recover", "coordinator", "it is back"
    )
    out = dlctl_command("status").out
    assert "· coordinator died; the new one has taken over 3." in out
    assert "s ago\n" in out
    forgotten = "the 23 s before it died are not on record: what was trained in them is again"
    run.event(now - 2, "recover", "coordinator", "it is back", forgotten=forgotten)
    assert f"s ago; {forgotten}\n" in dlctl_command("status").out


@pytest.mark.parametrize(
    ("role", "then"),
    [("server", "the run fails without server-0"), ("worker", "its workers start on the others")],
)
def test_a_host_that_is_away_is_the_root_and_what_becomes_of_it_is_said(
    run, dlctl_command, role, then
):
    now = time.time()
    there = {"agent": "agent-1", "updated_at": now - 20}
    run.daemon(
        "agent-1", agent="agent-1", host="h3", state="backoff", given_up_at=now + 90,
        updated_at=now - 20,
    )  # fmt: skip
    run.daemon(f"{role}-0", state="slow", phase="serving", **there)
    run.daemon("worker-7", state="quarantined", error="a NaN", **there)
    worker(run, 1, phase="fetching", waiting_for=f"{role}-0", waits_s=20)
    roots = json.loads(dlctl_command("why", "--json").out)["causes"]
    told = {root["name"]: root["what"] for root in roots}
    assert told["agent-1"].startswith("cannot be reached on h3; it is given up in 1m")
    assert told["agent-1"].endswith(f"and then {then}")
    assert told[f"{role}-0"].endswith("nor has its host")
    assert told["worker-7"] == "is quarantined: a NaN", "that has nothing to do with its host"


def test_a_quarantined_worker_is_a_cause_even_if_nobody_waits_for_it(run, dlctl_command):
    worker(run, 1, state="quarantined", error="20 steps in a row with a NaN")
    out = dlctl_command("why").out
    assert out.startswith("worker-1 is quarantined: 20 steps in a row with a NaN\n")
    assert "next: dlctl restart worker-1" in out


def test_a_limit_that_is_reached_is_a_cause_with_the_command_that_raises_it(run, dlctl_command):
    for index, rate in enumerate((4.9e6, 5.0e6, 1.0e6)):
        metrics = {"push_bytes_per_s": rate, "settings": {"push": 5e6, "fetch": None}}
        worker(run, index, metrics=metrics | {"push_waiting_bytes": 600_000})
    out = dlctl_command("why").out.splitlines()
    assert out[0] == (
        "push limit: the limit of 5 MB/s is what is waited for, with 1.2 MB still to be pushed; "
        "it can be raised"
    )
    assert out[1] == "   next: dlctl set worker-0 worker-1 push=10MB/s -j digits-7f3a"
    assert [line.split()[1] for line in out[2:]] == ["worker-0", "worker-1"]


def test_while_it_starts_the_one_that_holds_up_the_others_is_named(run, dlctl_command):
    run.run(state="starting", waiting="worker-0 (building the model)")
    began = time.time() - 20
    run.daemon("worker-0", state="starting", phase="building the model", started_at=began)
    run.daemon(
        "server-0", state="starting", phase="waiting for the size of the model",
        waiting_for="worker-0", waiting_since=began,
    )  # fmt: skip
    out = dlctl_command("why").out.splitlines()
    assert out[0].startswith("worker-0: it starts: building the model, for 20")
    assert out[2].startswith("└─ server-0 waits for it, for 20")
    assert len(out) == 3, "what the coordinator says is told already"


def test_what_only_the_coordinator_knows_is_passed_on(run, dlctl_command):
    run.run(waiting="the warm start of worker-0")
    worker(run, 0)
    assert "the run: it waits for the warm start of worker-0" in dlctl_command("why").out


def test_whom_the_coordinator_keeps_waiting_waits_for_whom_the_run_waits_for(run, dlctl_command):
    run.run(waiting="warm start: worker-0 works alone for 90 more steps")
    run.daemon("server-0", state="slow", updated_at=time.time() - 9)
    worker(run, 0, phase="pushing", waiting_for="server-0", waits_s=8)
    worker(run, 1, phase="waiting for data", waiting_for="coordinator", waits_s=30)
    out = dlctl_command("why").out.splitlines()
    assert [line.split()[1 if "└" in line else 0] for line in out if "next" not in line] == [
        "server-0", "worker-0", "worker-1"
    ]  # fmt: skip
    assert "coordinator" not in "".join(out)


def test_a_worker_that_was_killed_a_moment_ago_is_told_of_at_once(run, dlctl_command):
    last = {"code": -9, "text": "killed by SIGKILL", "at": time.time() - 0.5, "last_lines": []}
    worker(run, 0)
    worker(run, 1, state="starting", phase="building the model", incarnation=2, last_exit=last)
    expected = "; a new one starts (building the model); its data goes to the others"
    first, after = dlctl_command("why").out.splitlines()
    assert first.startswith("worker-1 was killed by SIGKILL 0.")
    assert first.endswith(f"s ago{expected}")
    assert after == "   next: dlctl logs worker-1 --previous -j digits-7f3a"
    shown = dlctl_command("status").out
    assert "! worker-1 was killed by SIGKILL 0." in shown
    assert expected in shown


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exit 1", "ended with exit 1 3.0s ago"),
        (
            "killed by SIGKILL (out of memory: 9 MiB)",
            "was killed by SIGKILL (out of memory: 9 MiB) 3.0s ago",
        ),
        ("killed: no word for 15 s", "was killed 3.0s ago: no word for 15 s"),
        ("gone; nobody saw how it ended", "was found gone 3.0s ago; nobody saw how it ended"),
        ("", "was killed by SIGTERM 3.0s ago"),
    ],
)
def test_every_end_is_told_in_a_sentence(text, sentence):
    assert problems.died({"code": -15, "text": text, "at": 7.0}, 10.0) == sentence


def test_a_daemon_that_is_frozen_is_told_of_before_it_is_given_up(run, dlctl_command):
    run.run(updated_at=time.time() + 60)
    worker(run, 0)
    run.daemon("server-0", phase="serving", updated_at=time.time() - 2.9)
    out = dlctl_command("why").out
    assert out.startswith("server-0 has not answered for 2.9s; it will be replaced after 15 s ")
    run.daemon("server-0", state="slow", phase="serving", updated_at=time.time() - 7.4)
    out = dlctl_command("why").out
    assert out.startswith("server-0 has not answered for 7.4s; it will be replaced after 15 s ")
    assert "next: dlctl restart server-0" in out


def test_a_frozen_coordinator_is_not_answering_everywhere(run, dlctl_command):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as frozen:
        old = {"updated_at": time.time() - 44.4, "samples_per_s": 3549.0}
        run.run(**old, **identity(frozen.pid)).daemon("agent-0", **ME)
        worker(run, 0, metrics={"samples_per_s": 80.0, "push_bytes_per_s": 5e6})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
            status, listed, why, failed = (
                dlctl_command(*command)
                for command in (["status"], ["ps"], ["why"], ["logs", "--failed"])
            )
            assert dlctl_command("status", "--check").code == 3
        frozen.kill()
    said = f"has not answered for 44s (pid {frozen.pid}); it will be replaced after 30 s without a"
    helps = f"kill -9 {frozen.pid} has its agent start another one at once"
    assert status.out.startswith("digits-7f3a  not answering for 44s  up")
    assert "- samples/s" in status.out.splitlines()[0]
    (row,) = (line for line in status.out.splitlines() if line.startswith("worker-0"))
    assert "80" not in row
    assert f"! coordinator {said} word; what is above is old\n" in status.out
    assert f" next {helps}, which goes on where it was: nothing is lost" in flat(status.out)
    assert "  not answering  " in listed.out
    assert why.out.startswith(f"coordinator {said}")
    assert "\n   what has been handed out goes on without it; all that is new waits" in why.out
    assert f"next: kill -9 {frozen.pid}" in why.out
    assert said in failed.out


@pytest.mark.parametrize(
    ("free_bytes", "why", "step"),
    [
        (0, ": runs has 0 B left", "df -h runs\n{}make room there"),
        (10**12, "", "dlctl logs coordinator -l warning -j digits-7f3a"),
    ],
)
def test_a_coordinator_that_works_and_cannot_write_is_not_silent(
    run, dlctl_command, monkeypatch, free_bytes, why, step
):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as at_work:
        run.run(updated_at=time.time() - 44.4, **identity(at_work.pid)).daemon("agent-0", **ME)
        worker(run, 0, waiting_for="server-0", waits_s=60, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
        worker(run, 1, **ME)
        (run.path / paths.LOCK).touch()
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        usage = shutil.disk_usage(run.path)._replace(free=free_bytes)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        status, why_, failed = (
            dlctl_command(*command) for command in (["status"], ["why"], ["logs", "--failed"])
        )
        checked = dlctl_command("status", "--check")
        os.utime(run.path / paths.LOCK, (time.time() - 22, time.time() - 22))
        assert dlctl_command("why").out.startswith("coordinator has not answered for 22s")
        frozen = dlctl_command("status").out
        assert "goes on with what this one could still write\n" in frozen
        assert "nothing is lost" not in frozen
        at_work.kill()
    said = f"coordinator cannot write the run's database{why}; what is shown is 44s old ("
    assert status.out.startswith("digits-7f3a  running  up")
    assert status.out.count("! ") == 1, "nothing of the others, of whom nobody knows"
    assert f"! {said}" in status.out
    assert f"       next: {step.format(13 * ' ')}\n" in status.out
    assert why_.out.startswith(said)
    without = "); training goes on without worker-0, whose next process joins when this can"
    assert why_.out.endswith(f"{without} be written\n   next: {step.format(9 * ' ')}\n")
    assert [said in line for line in failed.out.splitlines()] == [True]
    assert "kill" not in status.out + why_.out + failed.out
    assert (checked.code, "is running, but cannot write" in checked.err) == (3, True)


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
        worker(run, 0, **ME)
        (run.path / paths.LOCK).touch()
        os.utime(run.path / paths.LOCK, (time.time() - 44, time.time() - 44))
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        refuse(monkeypatch)
        why = dlctl_command("why").out
        at_work.kill()
    said = "coordinator cannot write the run's database: runs takes nothing: Read-only file system"
    assert why.startswith(said)
    assert (
        "training goes on\n   next: findmnt -T runs\n         see why with dmesg, then check" in why
    )
    assert "kill" not in why


def test_whose_agent_may_not_be_able_to_start_a_coordinator_on_such_a_disk_hears_that(
    run, dlctl_command, monkeypatch
):
    run.run(updated_at=time.time() - 5, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    refuse(monkeypatch)
    why = dlctl_command("why").out
    said = "its agent may not be able to start another one: runs takes nothing: Read-only"
    assert said in why
    assert "findmnt -T runs\n" in why
    assert "mount it again, then\n         dlctl recover -j digits-7f3a\n" in why


@pytest.mark.parametrize("is_known", [True, False], ids=["", "a new coordinator"])
def test_a_server_without_room_for_its_shard_needs_room_and_no_other_help(
    run, dlctl_command, is_known
):
    """How the one before it ended is not on record: a new coordinator does not know."""
    exited = {"code": -9, "text": "killed by SIGKILL", "at": time.time() - 3, "last_lines": []}
    run.daemon(
        "server-0", state="starting", phase="waiting for room",
        last_exit=exited if is_known else None, incarnation=2, updated_at=time.time(), **ME,
    )  # fmt: skip
    worker(run, 0, phase="pushing", waiting_for="server-0", waits_s=5.0, **ME)
    out = dlctl_command("why").out.splitlines()
    assert "starts (waiting for room); it goes on with its shard" in out[0]
    assert out[1] == "   next: dlctl logs server-0 -l error -j digits-7f3a"
    assert out[2] == "         says where: make room for its state there"


@pytest.mark.parametrize(
    ("dead", "said"),
    [
        ([], "training goes on\n"),
        (["worker-1"], "training goes on without worker-1, whose next process joins when this"),
        (["server-0", "worker-1"], "training waits for server-0, whose next process begins"),
        (["worker-0", "worker-1"], "training waits for worker-0 and worker-1, whose next process"),
    ],
)
def test_who_dies_while_nothing_can_be_written_is_waited_for_if_all_need_it(
    run, dlctl_command, monkeypatch, dead, said
):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as at_work:
        run.run(updated_at=time.time() - 44.4, **identity(at_work.pid)).daemon("agent-0", **ME)
        for name in ("server-0", "worker-0", "worker-1"):
            run.daemon(name, **(ME | ({"pid_start": OF_ANOTHER_BOOT} if name in dead else {})))
        (run.path / paths.LOCK).touch()
        monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
        status = dlctl_command("status").out
        at_work.kill()
    assert f"; {said}" in status
    assert ("training goes on" in status) == said.startswith("training goes on")


def test_a_coordinator_that_has_yet_to_say_its_first_word_is_starting(run, dlctl_command):
    run.run(updated_by=OF_ANOTHER_BOOT, incarnation=2)
    assert "· coordinator has died or was restarted; the next one" in dlctl_command("status").out
    assert dlctl_command("why").out.startswith("coordinator has died or was restarted; the next")
    run.run(updated_by=ME["pid_start"])
    assert dlctl_command("why").out.startswith("nobody waits")


def test_a_dead_coordinator_is_the_root(run, dlctl_command):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    run.run(updated_at=time.time() - 12.3, **gone).daemon("agent-0", **ME)
    expected = f"coordinator has been gone for 12s (pid {dead.pid})"
    meanwhile = "   what has been handed out goes on without it; all that is new waits for it"
    out = dlctl_command("why").out
    assert out.startswith(f"{expected}; its agent starts another one\n{meanwhile}\n")
    run.daemon("agent-0", **gone).daemon("worker-0", **ME)
    out = dlctl_command("why").out
    alone = f"{expected}, and nobody starts it again\n"
    assert out.startswith(f"{alone}{meanwhile}\n   next: dlctl recover")
    data = json.loads(dlctl_command("why", "--json").out)
    assert [wait["name"] for wait in data["causes"][0]["waiting"]] == ["worker-0"]
    run.daemon("worker-0", **gone)
    out = dlctl_command("why").out
    assert out.startswith(f"{alone}   gone, too: agent-0, worker-0\n   next: dlctl recover")


def test_what_every_next_coordinator_ends_with_is_told_and_recover_does_not_call_it_well(
    run, dlctl_command, monkeypatch
):
    """The process of each is there for a moment, and says nothing but that to its log."""
    monkeypatch.setattr(recover, "LED_S", 0.0)
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 0.5)
    heard_at = time.time() - 12.3
    run.run(updated_at=heard_at, updated_by=OF_ANOTHER_BOOT, state="running", incarnation=3)
    run.daemon("agent-0", **ME)
    taken = "cannot listen on tcp://127.0.0.1:17501: Address already in use (held by pid 9, nc)"
    for number, age_s in ((2, 9.0), (3, 4.0)):
        run.log("coordinator", number, {"ts": at(age_s), "level": "error", "msg": taken})
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    said = "coordinator has been gone for 12s; its agent starts another one again and again"
    for process in (ME, gone):
        run.run(**process)
        for command in ("why", "status"):
            assert f"{said}, which ends at once: {taken}" in dlctl_command(command).out
        looked = dlctl_command("recover", "--dry-run").out
        assert "nothing to recover" not in looked
        assert f"  cause         | {taken}\n" in looked
    run.log("coordinator", 4, {"ts": at(0.0), "level": "info", "msg": "coordinator starts"})
    run.run(updated_by=ME["pid_start"], updated_at=time.time(), **ME)
    assert dlctl_command("why").out.startswith("nobody waits")
    assert "there is nothing to recover" in dlctl_command("recover", "--dry-run").out


def test_one_end_with_an_error_is_no_row_of_them(run, dlctl_command, monkeypatch):
    """Nor is what was logged before the run was started again, or by one that had worked."""
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 0.5)
    row = [{"ts": at(8.0 - n), "level": "info", "msg": f"step {n}"} for n in range(30)]
    full = {"ts": at(1.0), "level": "error", "msg": "cannot write the run's database"}
    run.log("coordinator", 1, {"ts": at(90_000.0), "level": "error", "msg": "Address in use"})
    run.log("coordinator", 2, *row, full)
    run.log("coordinator", 3, {"ts": at(0.9), "level": "error", "msg": "Address in use"})
    run.daemon("agent-0", **ME)
    for heard_at in (time.time() - 12.0, None):
        run.run(updated_at=heard_at, updated_by=OF_ANOTHER_BOOT, incarnation=4)
        for command in ("why", "status"):
            assert "ends at once" not in dlctl_command(command).out


def at(age_s: float) -> str:
    return datetime.fromtimestamp(time.time() - age_s, UTC).isoformat()


def test_recover_leaves_a_coordinator_alone_that_works_and_cannot_write(
    run, dlctl_command, monkeypatch
):
    """A successor that has put its pid on record before the disk was full."""
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0)
    run.run(updated_at=time.time() - 44.4, updated_by=OF_ANOTHER_BOOT, incarnation=2)
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    for command in (("recover", "--dry-run"), ("recover",), ("recover", "--from-checkpoint")):
        code, out, err = dlctl_command(*command)
        assert (code, "its coordinator works: there is nothing to recover" in out) == (0, True), err


def test_an_agent_that_is_stopped_is_not_said_to_start_anybody(run, dlctl_command):
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as coordinator,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as agent,
    ):
        run.run(updated_at=time.time() - 44.4, **identity(coordinator.pid))
        run.daemon("agent-0", **identity(agent.pid))
        agent.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
            silent = dlctl_command("why").out
        coordinator.kill()
        coordinator.wait()
        out = dlctl_command("why").out
        agent.kill()
    recover = "dlctl recover -j digits-7f3a"
    assert f"next: kill -9 {coordinator.pid}; {recover}\n" in silent
    assert "it will be replaced" not in silent
    alone = f"and nobody starts it again: agent-0 is stopped (pid {agent.pid})\n"
    assert alone in out
    assert "next: dlctl recover --dry-run -j digits-7f3a\n" in out


def test_a_full_disk_is_told_of_before_anybody_waits_for_it(run, dlctl_command, monkeypatch):
    usage = shutil.disk_usage(run.path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    out = dlctl_command("why").out
    assert out.startswith("the disk: runs has 0 B left: the run's database has no room\n")
    assert "next: df -h runs" in out


def test_what_has_to_be_done_before_a_quarantined_worker_is_restarted_is_said(run, dlctl_command):
    error = f"{NO_USE} for 20 steps in a row (worker-1)"
    run.daemon("worker-1", state="quarantined", error=error)
    back = "first, then\n         dlctl restart worker-1 -j digits-7f3a\n"
    out = dlctl_command("why").out
    assert f"worker-1 is quarantined: {error}" in out
    assert f"   next: correct what gives this worker such values (its host, its data) {back}" in out


def test_for_how_long_a_coordinator_is_gone_is_seen_by_its_lock(run, dlctl_command):
    """On a full disk it writes nothing, and touches that as long as it lives."""
    run.run(updated_at=time.time() - 44.4, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME)
    (run.path / paths.LOCK).touch()
    os.utime(run.path / paths.LOCK, (time.time() - 8.1, time.time() - 8.1))
    assert re.match(r"coordinator has been gone for 8\.\ds \(pid ", dlctl_command("why").out)


def test_a_coordinator_that_cannot_write_that_it_is_there_is_told_of(
    run, dlctl_command, monkeypatch
):
    run.run(updated_at=time.time() - 44.4, **(ME | {"pid_start": OF_ANOTHER_BOOT}))
    run.daemon("agent-0", **ME).daemon("server-0", **ME).daemon("worker-0", **ME)
    usage = shutil.disk_usage(run.path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with (run.path / paths.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = dlctl_command("why").out
    said = "coordinator has died or was restarted; the next one is there, and cannot write that: "
    assert out.startswith(f"{said}runs has 0 B left; what is shown is 44s old (")
    assert "); training goes on\n" in out
    assert out.endswith("   next: df -h runs\n         make room there\n")


def test_daemons_that_wait_for_each_other_are_found_too(run, dlctl_command):
    worker(run, 0, waiting_for="worker-1", waits_s=9)
    worker(run, 1, waiting_for="worker-0", waits_s=9)
    out = dlctl_command("why").out.splitlines()
    assert out[0].startswith("worker-0: computing")
    assert out[2].startswith("└─ worker-1 waits for it")
    assert len(out) == 3


def test_an_ended_run_has_nobody_who_waits_and_says_how_it_goes_on(run, dlctl_command):
    run.run(state="failed", reason="server-0: boom")
    code, out, _ = dlctl_command("why")
    assert (code, out) == (
        0,
        "nobody waits: digits-7f3a has failed: server-0: boom\n"
        "   next: dlctl recover --dry-run -j digits-7f3a\n"
        "         says what is left of it\n",
    )
    assert dlctl_command("why", "worker-9").code == 4


def test_rows_of_another_version_do_no_harm(run, dlctl_command):
    run.daemon("worker-0", waiting_for=7, waiting_since="soon", metrics=3, last_exit="gone")
    run.daemon("gardener-0", state="failed", role="gardener", waiting_for="\x1b[2Jserver-0")
    code, out, _ = dlctl_command("why")
    assert (code, "\x1b" in out) == (0, False)
