"""The problems that a coordinator finds: states of daemons, and the codes and facts that follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlctl.problems import Problem, read
from dlctl.roles.coordinator import problems
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.problems import STALLED_S
from dlctl.util.names import HOME_AGENT, WAITS_FOR_DISK, WAITS_FOR_SPACE
from dlctl.util.text import BLAMED, DISCARDED, ENDED_BY_ITSELF, KILLED, NO_WORKER

NOW = 1000.0
AGENTS = [HOME_AGENT, "agent-1"]
PLACED = {"server-0": HOME_AGENT, "worker-0": HOME_AGENT, "worker-1": HOME_AGENT,
          "worker-2": "agent-1"}  # fmt: skip


class Run:
    """A run all of whose daemons are well, until somebody changes that."""

    def __init__(self) -> None:
        self.members = Membership(AGENTS, PLACED, {})
        self.state, self.reason = "running", ""
        self.row: dict[str, Any] = {}
        self.context, self.shutdown = SimpleNamespace(unwritten="", untracked={}), None
        self.job = SimpleNamespace(timeouts=SimpleNamespace(silent_s=30.0))
        self.lacking = lambda: ""
        for daemon in self.members.daemons.values():
            daemon.restore_state("running")
            daemon.incarnation = 2
            daemon.phase = "computing"
            daemon.heard_at = daemon.reported_at = NOW

    def change(self, name: str, state: str = "running", **values: Any) -> Run:
        self.members.daemons[name].restore_state(state)
        for key, value in values.items():
            setattr(self.members.daemons[name], key, value)
        return self

    def find(self) -> list[Problem]:
        found = problems.find(cast(Any, self), self.row, NOW)
        assert read([problem.to_json() for problem in found]) == found, "plain values"
        return found


def test_of_a_run_that_is_well_there_are_none() -> None:
    assert Run().find() == []


EXIT = {"code": -9, "text": "killed by SIGKILL", "at": NOW - 8.0}
LOOP = {"code": 3, "text": "exit 3", "at": NOW - 90.0, "in_row": 4, "cause": "task"}
TASK = {"cause": "task", "restart": "worker-1"}
ENDED = {"exit": "killed by SIGKILL", "restarts": 4}
BY_ITSELF = f"{ENDED_BY_ITSELF}: {BLAMED}"
STALLED = {"commits": 3, "commit_wait_s": STALLED_S + 1.0, "commit_place": "/x y"}
ON_DISK = {"commits": 3, "cause": "disk", "folder": "'/x y'"}
STUCK = {"stuck_s": 23.0, "stuck_at": "/x/train.py:51"}
OF_ONE_DAEMON: list[tuple[dict[str, Any], str, float | None, dict[str, Any]]] = [
    ({"heard_at": NOW - 3.0}, "heartbeat-late", -3.0, {"limit_s": 30.0, "phase": "computing"}),
    ({"state": "slow", "heard_at": NOW - 9.0, "metrics": STUCK}, "heartbeat-late", -9.0,
     {"limit_s": 30.0, "phase": "computing"}),
    ({"state": "slow", "phase": "in one batch for 23 s", "metrics": STUCK}, "worker-stuck", -23.0,
     {"phase": "in one batch for 23 s", "place": "/x/train.py:51"}),
    ({"metrics": {"in_batch_s": 12.0}}, "batch-late", -12.0, {}),
    ({"state": "backoff", "last_exit": EXIT, "restarts": 4, "retry_at": NOW + 3.0},
     "daemon-restarting", -8.0, ENDED | {"retry_at": NOW + 3.0}),
    ({"state": "starting", "phase": "building the model", "last_exit": EXIT, "restarts": 4},
     "daemon-restarting", -8.0, ENDED | {"phase": "building the model", "incarnation": 1}),
    ({"last_exit": EXIT, "restarts": 4}, "daemon-restarted", -8.0, ENDED | {"incarnation": 1}),
    ({"last_exit": LOOP, "restarts": 4}, "worker-crash-loop", -90.0,
     {"exit": "exit 3", "in_row": 4, "restarts": 4, "incarnation": 1, **TASK}),
    ({"state": "backoff", "last_exit": LOOP, "restarts": 4}, "worker-crash-loop", -90.0,
     {"exit": "exit 3", "in_row": 4, "restarts": 4, **TASK}),
    ({"state": "backoff", "last_exit": LOOP | {"in_row": 1}}, "daemon-restarting", -90.0,
     {"exit": "exit 3", **TASK}),
    ({"state": "quarantined", "error": DISCARDED}, "daemon-quarantined", None,
     {"error": DISCARDED, "cause": "not finite"}),
    ({"state": "quarantined", "error": BY_ITSELF, "last_exit": LOOP},
     "daemon-quarantined", -90.0,
     {"error": BY_ITSELF, "exit": "exit 3", "in_row": 4, **TASK}),
    ({"state": "failed", "last_exit": EXIT, "error": "KeyError: 7"}, "daemon-failed", -8.0,
     {"exit": "killed by SIGKILL", "error": "KeyError: 7"}),
    ({"state": "starting", "phase": WAITS_FOR_SPACE, "started_at": NOW - 4.0}, "disk-full", -4.0,
     {"phase": WAITS_FOR_SPACE}),
    ({"phase": WAITS_FOR_DISK, "metrics": STALLED}, "disk-stalled", -STALLED_S - 1.0,
     ON_DISK | {"limit_s": STALLED_S}),
    ({"state": "starting", "phase": WAITS_FOR_DISK, "metrics": STALLED}, "disk-stalled",
     -STALLED_S - 1.0, ON_DISK | {"limit_s": STALLED_S}),
    ({"phase": WAITS_FOR_DISK, "heard_at": NOW - 3.0, "metrics": STALLED}, "heartbeat-late", -3.0,
     {"limit_s": 30.0, "phase": WAITS_FOR_DISK}),
    ({"state": "starting", "phase": "starting", "started_at": NOW - 4.0}, "daemon-starting", -4.0,
     {}),
    ({"state": "starting", "phase": "importing torch", "started_at": NOW - 4.0,
      "last_exit": {"code": 0, "text": "exit 0", "at": NOW}}, "daemon-starting", -4.0,
     {"phase": "importing torch"}),
    ({"state": "draining", "phase": "pushing"}, "daemon-leaving", None, {"phase": "pushing"}),
]  # fmt: skip


@pytest.mark.parametrize(("daemon", "code", "since", "facts"), OF_ONE_DAEMON)
def test_the_state_of_a_daemon_says_its_problem(
    daemon: dict[str, Any], code: str, since: float | None, facts: dict[str, Any]
) -> None:
    (found,) = Run().change("worker-1", **daemon).find()
    assert (found.code, found.daemon) == (code, "worker-1")
    assert found.since == (None if since is None else NOW + since)
    assert found.facts == {"incarnation": 2, **facts}


@pytest.mark.parametrize(
    "daemon",
    [
        {"last_exit": EXIT | {"at": NOW - 90.0}},
        {"last_exit": LOOP | {"at": NOW - 700.0}},
        {"last_exit": EXIT | {"code": 0}},
        {"heard_at": NOW - 1.5},
        {"phase": WAITS_FOR_DISK, "metrics": STALLED | {"commit_wait_s": STALLED_S - 1.0}},
        {"state": "pending"},
        {"state": "stopped"},
        {"waiting_for": "server-0", "waiting_since": NOW - 1.0},
        {"waiting_for": "server-0", "waiting_since": NOW - 40.0, "metrics": {"samples_per_s": 8.0}},
    ],
)
def test_what_is_long_ago_or_in_order_is_no_problem(daemon: dict[str, Any]) -> None:
    assert Run().change("worker-1", **daemon).find() == []


@pytest.mark.parametrize("state", ["running", "draining"])
def test_a_disk_that_is_slow_while_the_run_ends_is_a_problem_at_once(state: str) -> None:
    """The end waits for it only for seconds."""
    slow = STALLED | {"commit_wait_s": 2.0}
    run = Run().change("server-0", state, phase=WAITS_FOR_DISK, metrics=slow)
    run.state, run.shutdown = (
        "stopping",
        cast(Any, SimpleNamespace(state="stopped", step="draining", until=NOW + 4.0)),
    )
    (found,) = run.find()
    assert (found.code, found.daemon, found.since) == ("disk-stalled", "server-0", NOW - 2.0)
    assert found.facts == {"incarnation": 2, "step": "draining", "gives_up_at": NOW + 4.0} | ON_DISK


@pytest.mark.parametrize("place", [7, ["x"], "/" + "y" * 100_000, "", None])
def test_the_place_of_a_disk_may_be_anything(place: object) -> None:
    told = STALLED | {"commit_place": place, "commits": "many", "commit_wait_s": 99.0}
    (found,) = Run().change("server-0", phase=WAITS_FOR_DISK, metrics=told).find()
    assert found.code == "disk-stalled"
    assert len(str(found.facts)) < 400


def test_those_that_were_killed_on_request_are_in_no_trouble() -> None:
    run = Run().change("worker-1", "failed", last_exit=EXIT)
    run.state = run.reason = KILLED
    assert run.find() == []


def test_a_host_is_away_with_its_daemons() -> None:
    run = Run()
    run.change("agent-1", "backoff", given_up_at=NOW + 90.0, host="h3", heard_at=NOW - 20.0)
    run.change("worker-2", "slow", heard_at=NOW - 20.0)
    agent, worker = run.find()
    assert (agent.code, worker.code) == ("host-unreachable", "daemon-unreachable")
    assert agent.facts == {"incarnation": 2, "host": "h3", "given_up_at": NOW + 90.0}
    run.members.daemons["server-0"].agent = "agent-1"
    assert run.find()[0].facts["servers"] == "server-0"
    run.change("worker-2", "quarantined", error="a NaN", heard_at=NOW - 20.0)
    assert run.find()[1].code == "daemon-quarantined", "that has nothing to do with its host"


@pytest.mark.parametrize(
    ("stuck", "restart"),
    [
        ({"worker-0": 1, "worker-1": 1, "worker-2": 1}, ["'worker-*'"] * 3),
        ({"worker-0": 1, "worker-1": 1}, ["worker-0 worker-1"] * 2),
        ({"worker-0": 1, "worker-1": 2}, [None, None]),
    ],
)
def test_who_is_stuck_in_the_same_line_is_restarted_together(
    stuck: dict[str, int], restart: list[str | None]
) -> None:
    run = Run()
    for name, line in stuck.items():
        run.change(name, "slow", metrics={"stuck_s": 23.0, "stuck_at": f"train.py:{line}"})
    assert [problem.facts.get("restart") for problem in run.find()] == restart


def test_of_many_workers_a_fact_names_only_some() -> None:
    run = Run()
    run.members = Membership([HOME_AGENT], {f"worker-{n}": HOME_AGENT for n in range(400)}, {})
    for number, worker in enumerate(run.members.of_role("worker")):
        metrics = {"stuck_s": 9.0, "stuck_at": "train.py:1"} if number else {}
        run.change(worker.name, heard_at=NOW, metrics=metrics)
    waits(run.members.daemons["worker-0"], ", ".join(run.members.daemons), 9.0)
    found = run.find()
    assert len(found) == 400
    assert max(len(str(problem.facts)) for problem in found) < 200


@pytest.mark.parametrize("place", [7, ["x"], "/" + "y" * 100_000, "", None])
def test_a_place_may_be_anything(place: object) -> None:
    (found,) = Run().change("worker-1", metrics={"stuck_s": "long", "stuck_at": place}).find()
    assert found.code == "worker-stuck"
    assert len(str(found.facts.get("place", ""))) <= 200


# ---------------------------------------------------------------- waiting


def waits(daemon: Daemon, whom: str, since_s: float) -> None:
    daemon.waiting_for, daemon.waiting_since = whom, NOW - since_s


def test_the_slowest_of_a_barrier_is_waited_for_by_all() -> None:
    run = Run().change("worker-2", "slow", metrics={"stuck_s": 13.0})
    daemons = run.members.daemons
    waits(daemons["server-0"], "worker-2", 12.0)
    waits(daemons["worker-0"], "server-0", 11.0)
    waits(daemons["worker-1"], "server-0, worker-2", 11.0)
    found = {problem.daemon: problem for problem in run.find()}
    assert found["worker-2"].code == "worker-stuck"
    assert found["server-0"].facts["waiting_for"] == "worker-2"
    assert found["worker-1"].facts["waiting_for"] == "worker-2, server-0"
    assert {found[name].code for name in ("server-0", "worker-0", "worker-1")} == {"daemon-waiting"}


def test_who_is_well_and_waited_for_is_slow() -> None:
    run = Run()
    waits(run.members.daemons["worker-0"], "server-0", 9.0)
    wait, slow = run.find()
    assert (wait.code, wait.daemon, wait.since) == ("daemon-waiting", "worker-0", NOW - 9.0)
    assert (slow.code, slow.daemon, slow.since) == ("daemon-slow", "server-0", NOW - 9.0)


def test_whoever_waits_for_the_coordinator_waits_for_whom_the_run_waits_for() -> None:
    run = Run().change("server-0", "slow", heard_at=NOW - 9.0)
    run.row["waiting"] = "warm start: server-0 works alone"
    waits(run.members.daemons["worker-1"], "coordinator", 30.0)
    assert [(p.code, p.daemon) for p in run.find()] == [
        ("heartbeat-late", "server-0"), ("daemon-waiting", "worker-1"),
    ]  # fmt: skip


def test_what_only_the_run_waits_for_is_passed_on() -> None:
    run = Run()
    run.row["waiting"] = "the warm start of worker-0"
    (found,) = run.find()
    assert (found.code, found.daemon) == ("run-waiting", "run")
    assert found.facts == run.row


@pytest.mark.parametrize("settings", [None, 7, {}, {"push": None}, {"push": "off"}])
def test_without_a_limit_nobody_is_held_back(settings: object) -> None:
    metrics = {"push_bytes_per_s": 5e6, "settings": settings}
    assert Run().change("worker-0", metrics=metrics).find() == []


def test_a_limit_that_is_reached_has_all_of_its_workers() -> None:
    run = Run()
    for name, rate in (("worker-0", 4.9e6), ("worker-1", 5e6), ("worker-2", 1e6)):
        figures = {"push_bytes_per_s": rate, "push_waiting_bytes": 600_000}
        run.change(name, metrics=figures | {"settings": {"push": 5e6, "fetch": None}})
    (found,) = run.find()
    assert (found.code, found.daemon) == ("rate-limit", "run")
    assert found.facts == {
        "direction": "push", "limit_bytes_per_s": 5e6, "workers": "worker-0, worker-1",
        "waiting_bytes": 1_200_000,
    }  # fmt: skip


@pytest.mark.parametrize("bound", [7, {"push_every_steps": "many"}, {}])
def test_an_interval_that_is_not_at_its_limit_is_no_problem(bound: object) -> None:
    assert Run().change("worker-0", metrics={"bound": bound}).find() == []


def test_an_automatic_interval_that_is_too_short_has_all_of_its_workers() -> None:
    run = Run()
    for name in ("worker-0", "worker-2"):
        run.change(name, metrics={"bound": {"push_every_steps": 64}})
    (found,) = run.find()
    assert (found.code, found.daemon) == ("interval-at-limit", "run")
    assert found.facts == {"key": "push_every_steps", "steps": 64, "workers": "worker-0, worker-2"}


@pytest.mark.parametrize("method", [7, {"update_s": "long"}, {"update_s": 59.0}, {}])
def test_an_update_that_takes_seconds_is_no_problem(method: object) -> None:
    assert Run().change("worker-0", metrics={"method": method}).find() == []


def test_a_target_that_the_living_workers_cannot_reach_soon_says_how_long_it_takes() -> None:
    run = Run()
    for name, update_s in (("worker-0", 1900.0), ("worker-2", 2000.0)):
        run.change(name, metrics={"method": {"update_s": update_s}})
    (found,) = run.find()
    assert (found.code, found.daemon) == ("update-slow", "run")
    assert found.facts == {"update_s": 2000.0}


# ---------------------------------------------------------------- the run


SAVING = {"at": NOW - 22.0, "waiting": "worker-1", "gives_up_at": None}


@pytest.mark.parametrize(
    ("row", "code", "facts"),
    [
        ({"checkpoint_error": "disk full"}, "checkpoint-failed", {"error": "disk full"}),
        ({"target_error": "no acuracy"}, "target-unreachable", {"why": "no acuracy"}),
        ({"loss_noise": "it was 1 and 2"}, "loss-noisy", {"why": "it was 1 and 2"}),
        ({"saving": SAVING}, "checkpoint-late", {"waiting": "worker-1"}),
        ({"saving": SAVING | {"at": NOW - 3.0}}, None, {}),
        ({"saving": None, "checkpoint_error": "", "target_error": ""}, None, {}),
    ],
)
def test_what_the_run_says_of_itself(
    row: dict[str, Any], code: str | None, facts: dict[str, Any]
) -> None:
    run = Run()
    run.row = row
    assert [(p.code, p.facts) for p in run.find()] == ([] if code is None else [(code, facts)])


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("server-0: boom", {}),
        ("worker-0: task.loss raised KeyError: 7 (/x/train.py:45)", {"place": "/x/train.py:45"}),
        (f"{NO_WORKER}: worker-0: {DISCARDED} for 20 steps in a row", {"cause": "not finite"}),
        (f"{NO_WORKER}: worker-0: {ENDED_BY_ITSELF} (exit 3)", {"cause": "task"}),
    ],
)
def test_a_run_that_has_failed_says_why(reason: str, facts: dict[str, str]) -> None:
    run = Run()
    run.state, run.reason = "failed", reason
    (found,) = run.find()
    assert (found.code, found.daemon) == ("run-failed", "run")
    assert found.facts == {"reason": reason, **facts}


def test_a_database_that_cannot_be_written_is_told_to_whoever_asks_over_the_network() -> None:
    run = Run()
    run.context.unwritten = "database or disk is full"
    (found,) = run.find()
    assert (found.code, found.daemon) == ("coordinator-unwritable", "coordinator")
    assert found.facts == {"why": "database or disk is full"}


def test_a_tracker_that_takes_no_figures_is_a_problem_until_it_does() -> None:
    run = Run()
    facts: dict[str, Any] = {"since": NOW - 5.0, "why": "no such host", "dropped": 0}
    run.context.untracked = {"wandb": facts, "mlflow": facts | {"dropped": 7}}
    assert [(p.code, p.since, dict(p.facts)) for p in run.find()] == [
        ("tracker-failed", NOW - 5.0, {"tracker": "wandb", "why": "no such host"}),
        ("tracker-failed", NOW - 5.0, {"tracker": "mlflow", "why": "no such host", "dropped": 7}),
    ]
