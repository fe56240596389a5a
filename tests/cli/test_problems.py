"""The table of problems: a line and a command for every code, in every command the same."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from process_identity import ME

from dlctl.ops import problem_texts, problems
from dlctl.ops.problem_texts import fill
from dlctl.problems import Code, Problem, read

pytestmark = pytest.mark.usefixtures("clock_stands")

LOGS = "dlctl logs worker-1 -j digits-7f3a"
AGAIN = "find what ends the process in train.py and fix it, then\ndlctl restart "
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("coordinator-silent", {"pid": 7, "limit_s": 30.0},
     "no heartbeat for 8.0s (pid 7); replaced after 30s; the state shown is stale", ""),
    ("coordinator-gone", {"pid": 7, "agent": "its agent", "cause": "restarts"},
     "process gone for 8.0s (pid 7); its agent restarts it",
     "dlctl recover -j digits-7f3a\nif this persists"),
    ("coordinator-restarting", {}, "restarting; last status 8.0s ago",
     "dlctl logs worker-1 --previous -j digits-7f3a"),
    ("coordinator-restarted", {"how": "died"}, "restarted 8.0s ago (died)",
     "dlctl logs worker-1 --previous -j digits-7f3a"),
    ("coordinator-unwritable", {"why": "runs has 0 B left", "cause": "full", "folder": "runs"},
     "cannot write the run's database: runs has 0 B left; the state shown is 8.0s old",
     "df -h runs\nfree space there"),
    ("host-unreachable", {"host": "h3", "given_up_at": 90.0, "servers": "server-0"},
     "unreachable on h3; given up in 1m30s; the run then fails without server-0",
     "dlctl doctor JOBFILE"),
    ("daemon-unreachable", {}, "no heartbeat for 8.0s, nor from its host", ""),
    ("heartbeat-late", {"limit_s": 30.0}, "heartbeat late: 8.0s (limit 30s)",
     "dlctl restart worker-1 -j digits-7f3a"),
    ("worker-stuck", {"phase": "in one batch for 23 s"}, "slow: stuck in one batch for 23 s",
     "dlctl restart worker-1 -j digits-7f3a"),
    ("worker-stuck", {"phase": "in one step for 9 s", "place": "/x/train.py:51", "cause": "task",
     "restart": "'worker-*'"}, "slow: stuck in one step for 9 s, at /x/train.py:51",
     "find out why /x/train.py:51 does not return and fix it, then\n"
     "dlctl restart 'worker-*' -j digits-7f3a"),
    ("batch-late", {}, "in one batch for 8.0s, longer than usual", LOGS),
    ("worker-crash-loop", {"exit": "exit 3", "in_row": 4, "cause": "task",
     "restart": "worker-0 worker-1"}, "exited 8.0s ago: exit 3, 4 times in a row",
     f"{AGAIN}worker-0 worker-1 -j digits-7f3a"),
    ("daemon-quarantined", {"error": "a NaN", "cause": "not finite"},
     "quarantined: a NaN (8.0s ago)",
     "fix its host or its data, then\n"
     "dlctl restart worker-1 -j digits-7f3a"),
    ("daemon-failed", {"exit": "exit 1", "error": "boom {x} [y]"},
     "failed 8.0s ago: exit 1; boom {x} [y]", LOGS),
    ("daemon-restarting", {"exit": "killed by SIGKILL", "restarts": 4, "retry_at": 3.0},
     "exited 8.0s ago: killed by SIGKILL; restart 4 in 3.0s",
     "dlctl logs worker-1 --previous -j digits-7f3a"),
    ("daemon-restarting", {"restarts": 1, "phase": "importing torch"},
     "restart 1: importing torch", "dlctl logs worker-1 --previous -j digits-7f3a"),
    ("daemon-restarted", {"exit": "exit 1"}, "exited 8.0s ago: exit 1; restarted",
     "dlctl logs worker-1 --previous -j digits-7f3a"),
    ("process-gone", {"pid": 7}, "process gone (pid 7); last heartbeat 8.0s ago", ""),
    ("daemon-starting", {"phase": "importing torch"}, "starting for 8.0s: importing torch", LOGS),
    ("daemon-leaving", {"phase": "pushing"}, "draining: pushing", LOGS),
    ("daemon-waiting", {"waiting_for": "server-0", "phase": "pushing"},
     "waits for server-0 for 8.0s: pushing", ""),
    ("daemon-slow", {"phase": "serving"}, "others wait for it for 8.0s: serving", LOGS),
    ("rate-limit", {"direction": "push", "limit_bytes_per_s": 5e6, "workers": "worker-0, worker-1",
     "waiting_bytes": 1.2e6},
     "push limit of 5 MB/s reached by worker-0, worker-1; 1.2 MB waiting",
     "dlctl set 'worker-*' push=off -j digits-7f3a\nlifts it"),
    ("rounds-few", {"why": "about 9 rounds, and a momentum of 0.9 needs 18"},
     "about 9 rounds, and a momentum of 0.9 needs 18",
     "dlctl set --list -j digits-7f3a"),
    ("interval-at-limit", {"key": "push_every_steps", "steps": 64, "workers": "worker-0, worker-1"},
     "push_every_steps = auto is at its maximum, 64 steps: the link needs more "
     "(worker-0, worker-1)",
     "dlctl set --list -j digits-7f3a"),
    ("update-slow", {"update_s": 2048.0}, "an update takes 34m08s at the present rate",
     "dlctl set --list -j digits-7f3a"),
    ("checkpoint-late", {"waiting": "worker-1", "gives_up_at": 95.7},
     "a checkpoint takes 8.0s; waits for worker-1, 1m35s at most",
     "dlctl logs coordinator -j digits-7f3a"),
    ("checkpoint-failed", {"error": "server-0: disk full"},
     "the last checkpoint failed: server-0: disk full", "dlctl checkpoint -j digits-7f3a"),
    ("target-unreachable", {"why": "evaluate returns no acuracy"},
     "the target cannot be reached: evaluate returns no acuracy", "dlctl stop -j digits-7f3a"),
    ("mirror-refused", {"why": "access is denied", "step": 40},
     "the mirror does not take checkpoints for 8.0s: access is denied; its newest is of step 40",
     "dlctl doctor JOBFILE"),
    ("mirror-behind", {"address": "s3://bucket/x", "why": "it is throttling"},
     "the mirror has no newer checkpoint for 8.0s: it is throttling",
     "dlctl checkpoint ls s3://bucket/x"),
    ("tracker-failed", {"tracker": "wandb", "why": "no such host", "dropped": 12},
     "wandb does not take the run's figures for 8.0s: no such host; 12 rows dropped",
     "dlctl logs coordinator -l warning -j digits-7f3a"),
    ("loss-noisy", {"why": "at the same parameters it was 1 and then 2"},
     "the loss depends on chance: at the same parameters it was 1 and then 2",
     "dlctl stop -j digits-7f3a\ncorrect train.py, then\ndlctl start --fresh JOBFILE"),
    ("disk-full", {"phase": "waiting for room"}, "the disk is full: waiting for room",
     "dlctl logs worker-1 -l error -j digits-7f3a\nshows where: free space there"),
    ("disk-stalled", {"limit_s": 10.0, "commits": 3, "cause": "disk", "folder": "'/x y'"},
     "its disk has made no commit durable for 8.0s (limit 10s); 3 under way",
     "findmnt -T '/x y'\nfind the cause there with dmesg"),
    ("disk-stalled", {"gives_up_at": 4.0, "step": "draining"},
     "its disk has made no commit durable for 8.0s; draining waits 4.0s at most", LOGS),
    ("run-waiting", {"waiting": "the warm start"}, "waits for the warm start",
     "dlctl logs coordinator -j digits-7f3a"),
    ("run-failed", {"reason": "server-0: boom"}, "failed: server-0: boom", ""),
    ("heartbeat-late", {"limit_s": None}, "heartbeat-late",
     "dlctl restart worker-1 -j digits-7f3a"),
]  # fmt: skip


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    return made.run(state="running", updated_at=time.time() + 60, **ME)


@pytest.mark.parametrize(("code", "facts", "text", "fix"), TABLE)
def test_every_code_has_a_line_and_a_command(run, code, facts, text, fix):
    from dlctl.runs.snapshot import load

    now = time.time()
    known = {
        key: now + value if key.endswith("_at") else value
        for key, value in facts.items()
        if value is not None
    }
    problem = Problem(code, "worker-1", now - 8.0, known)
    assert problem_texts.text(problem, now) == f"worker-1: {text}"
    assert problems.fix(load(run.path), problem) == fix


def test_no_code_is_left_out():
    assert problem_texts.CODES.keys() == set(get_args(Code)) == {code for code, *_ in TABLE}


def test_a_fact_is_text_and_no_template():
    assert fill("a[ {x}][ {y}]: {z}", {"x": "{z}", "z": "[{x}]"}) == "a {z}: [{x}]"
    assert fill("a: {x}", {}) == ""


@pytest.mark.parametrize(
    "rows",
    [None, 7, [7], [{}], [{"code": ["x"]}], [{"code": "of-tomorrow", "daemon": "worker-0"}]],
)
def test_what_another_version_has_written_is_left_out(rows):
    assert read(rows) == []
    odd = {"code": "worker-stuck", "daemon": 7, "since": "soon", "facts": {"phase": [1], "x": 1}}
    assert read([odd]) == [Problem("worker-stuck", "7", None, {"x": 1})]


SHOWN_BY_WHY_ALONE = ("daemon-waiting", "rate-limit")


def test_every_command_shows_the_same_problems(run, dlctl_command):
    now = time.time()
    run.daemon("worker-1", state="slow").daemon("worker-2").daemon("server-0")
    run.problem("heartbeat-late", "worker-1", now - 8.0, limit_s=30.0, incarnation=1)
    run.problem("daemon-waiting", "server-0", now - 4.0, waiting_for="worker-1", phase="serving")
    run.problem("daemon-restarted", "worker-2", now - 9.0, exit="exit 1", incarnation=1)
    late, restarted = "heartbeat late: 8.0s (limit 30s)", "exited 9.0s ago: exit 1; restarted"
    status, why, failed = (
        dlctl_command(*command).out for command in (["status"], ["why"], ["logs", "--failed"])
    )
    assert f"! worker-1: {late}\n       next: dlctl restart worker-1 -j digits-7f3a\n" in status
    assert f"· worker-2: {restarted}\n" in status
    assert "server-0: waits" not in status
    assert why == (
        f"worker-1: {late}\n   next: dlctl restart worker-1 -j digits-7f3a\n"
        "└─ server-0: waits for worker-1 for 4.0s: serving\n"
    )
    assert [line.partition("----  ")[2] for line in failed.splitlines()] == [late, restarted]
    rows = json.loads(dlctl_command("status", "--json").out)["problems"]
    assert [row["code"] for row in rows] == ["daemon-waiting", "heartbeat-late", "daemon-restarted"]
    assert [row["level"] for row in rows] == ["wait", "error", "over"]
    assert rows[1] == {
        "code": "heartbeat-late", "daemon": "worker-1", "since": rows[1]["since"],
        "facts": {"limit_s": 30.0, "incarnation": 1}, "level": "error",
        "text": f"worker-1: {late}", "next": "dlctl restart worker-1 -j digits-7f3a", "or": [],
    }  # fmt: skip
    failed = dlctl_command("logs", "--failed", "--json").out.splitlines()
    assert json.loads(failed[0]) == {"schema": "dlctl.problem/1", **rows[1]}
    (cause,) = json.loads(dlctl_command("why", "--json").out)["causes"]
    assert [wait["code"] for wait in cause.pop("waiting")] == ["daemon-waiting"]
    assert cause == rows[1]


def test_an_event_has_its_code(run, dlctl_command):
    run.event(9.0, "quarantine", "worker-1", "odd", code="daemon-quarantined")
    run.event(9.5, "exit", "worker-1", "it ended", code="\x1b[31m")
    out = dlctl_command("events").out
    assert [" odd" in line for line in out.splitlines()] == [True, False]
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("running", ["daemon-starting", "worker-stuck", "daemon-quarantined", "daemon-restarting"]),
        ("failed", ["daemon-quarantined", "daemon-failed", "run-failed"]),
        ("stopped", ["daemon-quarantined", "daemon-failed"]),
    ],
)
def test_of_an_ended_run_only_what_lasts_is_shown(run, dlctl_command, state, shown):
    run.problem("daemon-starting", "server-0").problem("worker-stuck", "worker-0", phase="x")
    run.problem("daemon-quarantined", "worker-1", error="a NaN").run(state=state)
    run.problem("daemon-restarting", "worker-2", 1.0, exit="exit 1", retry_at=time.time())
    rows = json.loads(dlctl_command("status", "--json").out)["problems"]
    assert [row["code"] for row in rows] == shown


def test_what_an_earlier_coordinator_has_written_is_not_shown_as_of_now(run, dlctl_command):
    run.run(updated_by="another process").problem("worker-stuck", "worker-0", phase="x")
    (row,) = json.loads(dlctl_command("status", "--json").out)["problems"]
    assert row["code"] == "coordinator-restarting"
