"""`status` and `ps` from databases made by hand: complete, early, stale, broken, strange."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from dead_runs import save
from next_step_lines import commands_of
from process_identity import ME, identity

from dlctl.cli.commands import status
from dlctl.util.text import KILLED

FULL = "server-0: disk full"
LAST = "worker-1 ended: killed"


def training(run):
    """A run in full swing with one worker in trouble."""
    now = time.time()
    (run.path / "ckpt/x").mkdir(parents=True)
    run.run(
        state="degraded",
        step=12345,
        samples=395040,
        data_epoch=2.412,
        loss=0.2134,
        samples_per_s=812.4,
        evaluation={"accuracy": 0.9123},
        evaluation_step=12000,
        method={"iteration": 12, "gradient_norm": 0.00321},
        checkpoint={"number": 3, "step": 12000, "path": str(run.path / "ckpt/x"), "at": now - 41,
                    "nbytes": 312_400_000, "error": ""},
        started_at=now - 723,
        updated_at=now + 60,
        waiting="worker-1 (back-off)",
        **ME,
    )  # fmt: skip
    run.daemon(
        "server-0", pid=41233, started_at=now - 723, restarts=0,
        metrics={"version": 8110, "push_bytes_per_s": 0.9e9, "fetch_bytes_per_s": 1.1e9,
                 "staleness_mean": 1.82},
    )  # fmt: skip
    run.daemon(
        "worker-0", pid=9911, started_at=now - 721, restarts=1,
        metrics={"step": 12345, "push_bytes_per_s": 96.4e6, "fetch_bytes_per_s": 118e6,
                 "settings": {"push": 200e6, "fetch": None}},
    )  # fmt: skip
    run.daemon(
        "worker-1", pid=None, state="backoff", restarts=4, retry_at=now + 3600,
        last_exit={"code": -9, "text": "", "at": now - 8,
                   "last_lines": ["RuntimeError: worker is killed"]},
        metrics={"step": 12339},
    )  # fmt: skip
    return run.problem(
        "daemon-restarting", "worker-1", now - 8, exit="killed by SIGKILL", restarts=4,
        retry_at=now + 3600,
    )  # fmt: skip


def test_a_run_in_depth(run_directory, dlctl_command, clock_stands, monkeypatch, golden):
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
    run = training(run_directory())
    code, out, err = dlctl_command("status")
    assert (code, err) == (0, "")
    assert commands_of(out) == [f"dlctl logs worker-1 --previous -j {run.path.name}"]
    golden("status", out)


def test_the_gradient_noise_scale_is_told(run_directory, dlctl_command):
    training(run_directory()).run(noise_scale=1234.4)
    told = "  noise       the gradient noise scale is 1234 samples\n"
    assert told in dlctl_command("status").out
    assert json.loads(dlctl_command("status", "--json").out)["noise_scale"] == 1234.4


def test_status_succeeds_whatever_the_state_and_check_says_3(run_directory, dlctl_command):
    run = training(run_directory())
    assert dlctl_command("status").code == 0
    ended = dlctl_command("status", "--check")
    assert (ended.code, "digits-7f3a" in ended.err) == (3, True)
    run.run(state="running", updated_at=time.time(), problems=[])
    assert dlctl_command("status", "--check").code == 0


def test_early_when_next_to_nothing_is_known(run_directory, dlctl_command):
    run_directory().run(state="pending", **ME).daemon("worker-0", state="starting")
    code, out, _ = dlctl_command("status")
    assert code == 0
    assert out.startswith("digits-7f3a  pending  up -  step -  epoch -  loss -  - samples/s\n")
    assert "worker-0 - starting" in " ".join(out.split())


def test_who_starts_is_said(run_directory, dlctl_command):
    run = run_directory().run(state="starting", **ME)
    run.daemon("worker-0", state="starting").problem(
        "daemon-starting", "worker-0", time.time() - 7.4, phase="importing"
    )
    ended = dlctl_command("status")
    assert ("importing" in ended.out, ended.next) == (True, "")


def test_old_news_is_called_old(run_directory, dlctl_command):
    run = run_directory().run(state="running", samples_per_s=9.0, updated_at=time.time() - 14.2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        run.run(**identity(process.pid))
        out = dlctl_command("status").out
        process.kill()
    assert "running  up -  step -  epoch -  loss -  - samples/s  state 14s old" in out
    assert re.search(r"\ncoordinator +\d+ +starting", out), "its process is young"


def test_a_dead_coordinator_is_told_and_living_orphans_are_named(
    run_directory, dlctl_command, clock_stands, monkeypatch, golden
):
    monkeypatch.setattr("dlctl.util.processes.age_s", lambda start: 100.0 if start else None)
    dead = gone()
    run = run_directory().run(state="running", updated_at=time.time() - 12.2, **dead)
    run.daemon("server-0", **dead).daemon("worker-0", **{**ME, "started_at": time.time()})
    out = dlctl_command("status").out
    golden("status-dead", out)
    assert dlctl_command("ps").out.splitlines()[1].split()[1] == "failed"


def gone() -> dict:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        return identity(dead.pid)


def test_a_coordinator_that_its_agent_starts_again_is_recovering(
    run_directory, dlctl_command, golden
):
    run = run_directory().run(state="running", updated_at=time.time(), **gone())
    run.daemon("agent-0", **ME)
    golden("status-recovering", dlctl_command("status").out.splitlines()[0])
    assert dlctl_command("status", "--check").code == 3
    assert json.loads(dlctl_command("status", "--json").out)["is_live"] is True
    run.run(state="starting")
    assert "digits-7f3a  starting (" in dlctl_command("status").out, "it has not been ready yet"


def test_a_quarantined_worker_is_shown_with_its_reason_and_the_way_back(
    run_directory, dlctl_command
):
    run = run_directory().run(state="degraded", updated_at=time.time(), **ME)
    last = {
        "code": 79,
        "text": "exit 79 (...)",
        "at": time.time() - 9,
        "last_lines": ["ERROR a NaN"],
    }
    run.daemon("worker-1", state="quarantined", last_exit=last)
    facts = {"error": "20 steps with a NaN", "exit": "exit 79"}
    run.problem("daemon-quarantined", "worker-1", last["at"], **facts)
    out = dlctl_command("status").out
    assert facts["error"] in out
    assert last["last_lines"][0] in out
    assert dlctl_command("status").next == "dlctl restart worker-1 -j digits-7f3a"
    run.run(state="failed")
    assert "restart" not in dlctl_command("status").next, "nobody is there to do it"


@pytest.mark.parametrize(
    ("inner", "shown"), [("none", "lr 0.7"), ("script", "outer_lr 0.7"), ("adamw", "outer_lr 0.7")]
)
def test_the_rate_of_the_servers_is_the_outer_one_where_replicas_have_one(
    run_directory, dlctl_command, inner: str, shown: str
) -> None:
    run = run_directory().run(state="running", updated_at=time.time(), rates={"lr": 0.7}, **ME)
    file = run.path / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"inner": {"name": inner}}))
    assert shown in dlctl_command("status").out.splitlines()[0].split("  ")


def test_what_a_process_said_while_all_was_well_is_not_why_it_was_killed(
    run_directory, dlctl_command
):
    run = run_directory().run(state="running", updated_at=time.time(), **ME)
    words = ["x y", "INFO goes on at version 7, which was long ago"]
    run.daemon("server-0", last_exit={"code": -9, "last_lines": words})
    run.problem("daemon-restarted", "server-0", time.time() - 9, exit="killed by SIGKILL")
    out = dlctl_command("status").out
    assert "| x y\n" in out
    assert "version 7" not in out


def test_a_finish_of_the_task_that_has_failed_is_told(run_directory, dlctl_command):
    finish = {"worker": "worker-0", "text": "", "error": "the worker that ran it has died"}
    run_directory().run(state="finished", finish=finish)
    assert finish["error"] in dlctl_command("status").rows["finish"]


def test_running_takes_a_process_that_is_there(run_directory, dlctl_command):
    run = run_directory().run(state="running", updated_at=time.time() + 60, **ME)
    run.daemon("agent-0", **gone())
    out = dlctl_command("status").out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("agent-0"))
    assert row[2] == "gone"
    assert "! agent-0: " in out


def test_what_to_do_when_all_workers_are_quarantined_is_no_mere_repetition(
    run_directory, dlctl_command, golden
):
    odd = "the loss or its gradient was not finite or too large for 20 steps in a row"
    reason = f"no worker is left: worker-1: {odd}"
    run_directory().run(state="failed", reason=reason, step=20, job_file="/x/job.toml")
    golden("status-no-worker", dlctl_command("status").out)


@pytest.mark.parametrize("state", ["slow", "quarantined", "stopped", "failed", "backoff"])
def test_only_a_daemon_at_work_has_rates(run_directory, dlctl_command, state):
    run = run_directory().run(state="running", updated_at=time.time() + 60, **ME)
    rates = {"samples_per_s": 1234.0, "push_bytes_per_s": 5e6, "fetch_bytes_per_s": 6e6}
    run.daemon("worker-0", state="running", metrics=rates)
    run.daemon("worker-1", state=state, metrics=rates)
    well, ill = (
        line for line in dlctl_command("status").out.splitlines() if line.startswith("worker")
    )
    for shown in ("1,234", "5 MB/s", "6 MB/s"):
        assert (shown in well, shown in ill) == (True, False)


def test_an_automatic_interval_is_shown_with_what_it_is_now(run_directory, dlctl_command):
    run = run_directory().run(state="running", updated_at=time.time() + 60, **ME)
    numbers = {"push_every_steps": 4, "fetch_every_steps": 2}
    run.daemon("worker-0", metrics={"settings": numbers, "intervals": numbers})
    run.daemon("server-0", metrics={"settings": {"lr": 0.1}})
    assert "EVERY" not in dlctl_command("status").out

    found = {"push_every_steps": 8, "fetch_every_steps": 2}
    settings = {"push_every_steps": "auto", "fetch_every_steps": 2}
    metrics = {"settings": settings, "intervals": found, "wait_share": 0.068}
    run.daemon("worker-1", state="running", metrics=metrics)
    run.daemon("worker-2", metrics={"settings": settings})  # nothing is measured yet
    lines = dlctl_command("status").out.splitlines()
    shown = {line.split()[0]: " ".join(line.split()) for line in lines if "-" in line}
    assert shown["server-0"].endswith("- -")
    assert shown["worker-0"].endswith(" 4 2")
    assert shown["worker-1"].endswith(" auto (8) 2")
    assert shown["worker-2"].endswith(" auto (-) 2")

    wide = dlctl_command("status", "worker-1", "--wide").out
    assert "WAITS" in wide
    assert " 7% " in wide
    data = json.loads(dlctl_command("status", "worker-1", "--json").out)
    (row,) = data["daemons"]
    assert row["metrics"]["settings"]["push_every_steps"] == "auto"
    assert row["metrics"]["intervals"]["push_every_steps"] == 8
    assert row["metrics"]["wait_share"] == 0.068
    assert dlctl_command("get", "worker-1", "push_every_steps", "-q").out == "auto\n"


def test_a_run_whose_checkpoints_fail_is_not_well(run_directory, dlctl_command):
    run = run_directory().run(state="running", updated_at=time.time() + 60, **ME)
    assert dlctl_command("status", "--check").code == 0
    run.problem("heartbeat-late", "worker-0", time.time() - 3, limit_s=15.0)
    assert dlctl_command("status", "--check").code == 0, "it may be a moment of load"
    run.problem("checkpoint-failed", "run", error=FULL)
    ended = dlctl_command("status", "--check")
    assert ended.code == 3
    assert FULL in ended.err


def test_a_last_checkpoint_without_a_residual_is_told_of_when_the_run_has_finished(
    run_directory, dlctl_command
):
    row = {"number": 3, "step": 345, "at": time.time(), "nbytes": 9, "error": ""}
    run = run_directory().run(state="finished", step=345, checkpoint=row | {"without": []})
    assert "residual" not in dlctl_command("status").out
    run.run(checkpoint=row | {"without": ["worker-1"]})
    assert "worker-1" in dlctl_command("status").rows["checkpoint"]


def test_a_daemon_is_as_old_as_its_process(run_directory, dlctl_command):
    run = run_directory().run(state="running", updated_at=time.time(), **ME)
    run.daemon("worker-0", started_at=time.time() - 7205, **ME)
    assert "2h00m" not in dlctl_command("status").out
    run.daemon("worker-0", pid=os.getpid(), pid_start=None, started_at=time.time() - 7205)
    assert " 2h00m " in dlctl_command("status").out


def test_an_evaluation_of_an_older_dlctl_is_shown_with_its_step(run_directory, dlctl_command):
    run_directory().run(state="running", evaluation={"accuracy": 0.91, "step": 12000}, **ME)
    assert "12,000" in dlctl_command("status").rows["evaluation"]
    found = json.loads(dlctl_command("status", "--json").out)
    assert (found["evaluation"], found["evaluation_step"]) == ({"accuracy": 0.91}, 12000)


def test_values_of_another_version_never_break_the_table(run_directory, dlctl_command):
    run = run_directory().run(
        state="dreaming", step="many", loss=float("nan"), evaluation=[1], **ME
    )
    run.daemon("worker-0", state="levitating", metrics={"step": None, "push_bytes_per_s": "fast"})
    run.daemon("gardener-0", role="gardener", metrics=7, last_exit="gone", settings=[])
    code, out, _ = dlctl_command("status", "--wide")
    assert code == 0
    assert "dreaming" in out
    assert "levitating" in out
    assert " nan " in out
    assert "gardener-0" in out


def test_foreign_text_cannot_steer_the_terminal(run_directory, dlctl_command):
    run = run_directory().run(state="running", reason="\x1b[2J\u202eevil\n", **ME)
    last = {"code": 1, "at": time.time(), "last_lines": ["\x1b]0;title\x07"]}
    run.daemon("worker-0", state="failed", last_exit=last)
    out = dlctl_command("status").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"\x1b[2J\u202eevil\n" in out


def test_json_has_the_truth_units_in_its_keys_and_utc_times(run_directory, dlctl_command):
    run = training(run_directory()).run(loss=float("inf"), started_at=1_750_000_000.0)
    data = json.loads(dlctl_command("status", "--json").out)
    assert data["schema"] == "dlctl.status/1"
    assert (data["run_id"], data["state"], data["is_live"]) == ("digits-7f3a", "degraded", True)
    assert data["started_at"] == "2025-06-15T15:06:40.000Z"
    assert data["loss"] is None
    assert data["directory"] == str(run.path)
    names = ["coordinator", "server-0", "worker-0", "worker-1"]
    assert [row["name"] for row in data["daemons"]] == names
    assert data["daemons"][3]["last_exit"]["at"].endswith("Z")


def test_one_daemon_comes_with_its_recent_events(run_directory, dlctl_command):
    run = training(run_directory())
    run.event(1000.0, "exit", "worker-1", LAST)
    run.event(1001.0, "set", "worker-0", "x")
    out = dlctl_command("status", "worker-1").out
    assert [text in out for text in (LAST, "worker-0")] == [True, False]
    ended = dlctl_command("status", "worker-9")
    assert (ended.code, '"worker-1"' in ended.err) == (4, True)


def test_an_ended_run_says_how_long_it_took(run_directory, dlctl_command):
    run_directory().run(state="finished", reason="3 epochs", started_at=1000.0, ended_at=1041.0)
    assert dlctl_command("status").out.startswith("digits-7f3a  finished (3 epochs)  took 41s")


def test_a_run_that_failed_says_what_starting_it_again_would_do(
    run_directory, dlctl_command, golden
):
    run = run_directory()
    file = run.path.parents[1] / "my job.toml"
    run.run(state="failed", reason="server-0 ended", step=170, job_file=str(file))
    begins = dlctl_command("status")
    assert begins.next == "dlctl start 'my job.toml'"
    save(run, step=0, number=1)
    assert dlctl_command("status").out == begins.out, "initial values are no progress"

    save(run, step=90, number=2)
    resumes = dlctl_command("status")
    assert resumes.next == "dlctl recover -j digits-7f3a"
    run.run(reason=f"worker-0: task.loss raised KeyError: 7 ({run.path.parents[1]}/train.py:45)")
    first = dlctl_command("status")
    assert "train.py:45" in first.next
    run.run(state="stopped")
    stopped = dlctl_command("status")
    assert stopped.next == "dlctl start 'my job.toml'"
    golden("status-next", "\n".join(each.out for each in (begins, resumes, first, stopped)))
    run.run(state="finished")
    assert not dlctl_command("status").next


def test_servers_with_different_rates_are_told_with_their_rates(run_directory, dlctl_command):
    run = training(run_directory()).run(uneven={"lr": {"server-0": 0.2, "server-1": 0.1}})
    out = dlctl_command("status").out
    assert [name in out for name in ("server-0 0.2", "server-1 0.1")] == [True, True]
    assert "dlctl set lr=VALUE" in out
    data = json.loads(dlctl_command("status", "--json").out)
    assert data["uneven"] == {"lr": {"server-0": 0.2, "server-1": 0.1}}
    run.run(state="stopped", pid=None)
    assert "server-0 0.2" not in dlctl_command("status").out


def test_an_error_of_all_workers_is_told_once(run_directory, dlctl_command):
    error, run = "task.loss raised KeyError: 7 (train.py:45)", run_directory(workers=2)
    run.run(state="failed", reason=f"worker-0, worker-1: {error}", pid=None, ended_at=time.time())
    last = {"code": 1, "text": "exit 1", "at": time.time(), "last_lines": ["Traceback", "  loss"]}
    for name in ("worker-0", "worker-1"):
        run.daemon(name, state="failed", error=error, pid=None, last_exit=last)
        run.problem("daemon-failed", name, last["at"], exit="exit 1", error=error)
    out = dlctl_command("status").out
    assert [out.count(text) for text in ("KeyError: 7", "| Traceback", "!")] == [1, 1, 2]


def test_who_was_killed_on_request_is_in_no_trouble(run_directory, dlctl_command):
    last = {"code": -9, "text": "killed by SIGKILL", "at": time.time(), "last_lines": []}
    run = run_directory().daemon("worker-0", state="failed", last_exit=last)
    run.problem("daemon-failed", "worker-0", last["at"], exit=last["text"])
    assert "! worker-0: failed " in dlctl_command("status").out
    run.run(state="stopped", reason=KILLED)
    assert "worker-0: failed" not in dlctl_command("status").out


def test_every_command_names_the_same_next_step_of_a_failed_run(run_directory, dlctl_command):
    run = run_directory().run(state="failed", reason="server-0 ended", step=170)
    save(run, step=90, number=1)
    for command in ("status", "why", "set worker-0 push=off", "restart worker-0"):
        assert dlctl_command(*command.split()).next == "dlctl recover -j digits-7f3a", command


def test_only_the_newest_run_of_a_job_file_can_be_started_again(run_directory, dlctl_command):
    runs = [run_directory(run_id) for run_id in ("digits-0001", "digits-0002")]
    for number, run in enumerate(runs):
        run.run(state="stopped", name="digits", job_file="/somewhere/job.toml")
        os.utime(run.path / "job.json", (1000 + number, 1000 + number))
    assert not dlctl_command("status", "-j", "digits-0001").next
    assert dlctl_command("status", "-j", "digits-0002").next == "dlctl start /somewhere/job.toml"


def test_watching_ends_with_the_run(run_directory, dlctl_command):
    run_directory().run(state="finished")
    assert dlctl_command("status", "--watch", "0.1").code == 0
    assert dlctl_command("status", "-w").code == 0


def test_watching_shows_a_run_until_it_has_ended(run_directory, dlctl_command, monkeypatch):
    run = run_directory().run(state="running", **ME)
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        run.run(step=len(pauses), state="running" if len(pauses) < 2 else "finished")

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep))
    code, out, _ = dlctl_command("status", "--watch", "7")
    heads = [line for line in out.splitlines() if line.startswith("digits-7f3a")]
    assert (code, pauses) == (0, [7.0, 7.0])
    assert ["running" in line for line in heads] == [True, True, False]
    assert "finished" in heads[-1]


def test_ps_lists_live_and_recent_runs_and_says_what_it_hides(run_directory, dlctl_command):
    for number, (run_id, at) in enumerate([("old-0001", 5.0), ("new-0002", time.time() - 60)]):
        run = run_directory(run_id).run(state="stopped", ended_at=at, algorithm="downpour")
        os.utime(run.path / "job.json", (1000 + number, 1000 + number))
    training(run_directory("digits-7f3a"))
    code, out, err = dlctl_command("ps")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["RUN", "digits-7f3a", "new-0002"]
    assert out.splitlines()[1].split()[-1] == "runs/digits-7f3a"
    assert "1 older" in err
    everything = dlctl_command("ps", "-a", "-q")
    assert everything.out.split() == ["digits-7f3a", "new-0002", "old-0001"]
    data = json.loads(dlctl_command("ps", "--json", "-a").out)
    assert data["schema"] == "dlctl.ps/1"
    assert [run["state"] for run in data["runs"]] == ["degraded", "stopped", "stopped"]


def test_ps_without_runs_shows_the_way_and_still_succeeds(own_place, dlctl_command):
    code, out, err = dlctl_command("ps")
    assert (code, out) == (0, "")
    assert "dlctl init" in err


def test_reading_commands_import_nothing_heavy(run_directory):
    training(run_directory())
    code = """
import sys
from dlctl.cli import app as main
for arguments in (["ps"], ["status"], ["logs"], ["events"], ["get"], ["wait", "--for", "step=1"]):
    assert main.run(arguments) == 0, arguments
print([m for m in ("torch", "numpy", "zmq", "rich", "pydantic", "msgpack") if m in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
