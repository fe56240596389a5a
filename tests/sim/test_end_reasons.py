"""What a run says of its end for ever after, and what its log says about whom."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from simulated import Watcher, job_file

from dlctl import registry
from dlctl.algorithms.base import MODEL, Table
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.supervision.failure_detector import last_error
from dlctl.roles.coordinator.supervision.registration import Past, Registration
from dlctl.roles.protocol.keyring import Keyring
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import Note

STOP = {"checkpoint": True, "grace_s": 30.0}
PORT = "cannot listen on tcp://127.0.0.1:7001: Address already in use; choose another port"


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ({}, "stopped by dlctl stop"),
        ({"origin": "command"}, "stopped by dlctl stop"),
        ({"origin": "SIGINT"}, "stopped by Ctrl-C"),
        ({"origin": "timeout"}, "stopped by dlctl run: it was not ready within --timeout"),
        ({"origin": "\x1b[2Jfinished"}, "stopped by dlctl stop"),
        ({"origin": ["SIGINT"]}, "stopped by dlctl stop"),
        ({"origin": "command", "kill": True}, "killed by dlctl stop --kill"),
    ],
)
def test_a_stop_is_recorded_with_who_asked_for_it_and_never_in_a_strangers_words(
    origin: dict[str, Any], reason: str
) -> None:
    simulation = Simulation(job_file(epochs=1000.0), LeastSquares())
    simulation.request(2.0, "stop", STOP | origin)
    outcome = simulation.run()
    assert (outcome.state, outcome.reason) == ("stopped", reason)
    assert outcome.store.texts("state")[-2:] == [f"stopping: {reason}", f"stopped: {reason}"]


def told_of_a_stop(**arguments: Any) -> list[tuple[str, list[str]]]:
    """What whoever asks hears, of each phase and of whom it waits for."""
    watcher = Watcher(m.Reply)
    simulation = Simulation(job_file(epochs=1000.0), LeastSquares(), checkers=(watcher,))
    simulation.world.disk.slow_s = {"server-0": 3.0}
    simulation.request(2.0, "stop", STOP | arguments)
    simulation.run()
    replies = [reply.result for reply in watcher.messages() if "waiting" in reply.result]
    told_of = [(result["phase"], result["waiting"]) for result in replies]
    return [key for key, _ in itertools.groupby(told_of)]


def test_whoever_stops_a_run_hears_whose_files_are_waited_for_and_of_no_short_wait() -> None:
    assert told_of_a_stop()[0] == ("saving", ["server-0"])


def test_whoever_kills_a_run_hears_of_no_step_that_is_passed_over() -> None:
    assert told_of_a_stop(kill=True) == [("over", [])]


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(0.15, f"server-0: {PORT}"), (3.0, f"server-0: {PORT}; its shard is lost")],
)
def test_a_server_that_gives_up_is_quoted_as_the_reason(seconds: float, reason: str) -> None:
    """Before the run is at work there is no shard to lose."""
    simulation = Simulation(job_file(durability="none", epochs=1000.0), LeastSquares())
    words = ("INFO server-0 starts, pid 7", f"ERROR {PORT}")

    def give_up() -> None:
        coordinator = simulation.world.process("coordinator").machine
        server = coordinator.members.daemons["server-0"]
        now = simulation.world.timeline.now
        exited = m.ProcessExited("server-0", server.incarnation, 1, words)
        coordinator.failure_detector.on_exit(exited, now)

    simulation.at(seconds, give_up)
    outcome = simulation.run()
    assert (outcome.state, outcome.reason) == ("failed", reason)


@pytest.mark.parametrize(
    ("status", "lines", "expected"),
    [
        (1, ("ERROR a pipe broke", "INFO trying again", f"ERROR {PORT}"), PORT),
        (1, ("INFO server-0 starts, pid 7",), ""),
        (-9, (f"ERROR {PORT}",), ""),
        (0, (f"ERROR {PORT}",), ""),
        (70, ("ERROR a bug in dlctl: ValueError: x", "Traceback (most recent call last):",
              "ValueError: x", "WARNING w", "TypeError: y"), "a bug in dlctl: ValueError: x"),
        (70, (), ""),
    ],
)  # fmt: skip
def test_the_last_error_of_a_daemon_is_why_it_gave_up_unless_it_was_killed(
    status: int, lines: tuple[str, ...], expected: str
) -> None:
    assert last_error(status, lines) == expected


def test_whom_an_ending_run_waits_for_reads_as_a_sentence() -> None:
    """Shown behind "waiting for": "waiting for worker-0 (draining)"."""
    compute = ComputeOptions(step_s=1.0, spread=0.0)
    simulation = Simulation(job_file(epochs=1000.0), LeastSquares(), compute=compute)
    seen: list[str] = []
    simulation.request(2.1, "stop", STOP)
    simulation.at(2.8, lambda: seen.append(simulation.store.run["waiting"]))
    simulation.run()
    assert seen == ["worker-0 (draining)"]


# ---------------------------------------------------------------- the log


def arrivals() -> Registration:
    placed = dict.fromkeys(("server-0", "worker-0", "worker-1"), HOME_AGENT)
    members = Membership([HOME_AGENT], placed, before={})
    members.daemons["worker-1"].peer = b"\x00one"
    members.daemons["agent-0"].peer = b"\x00two"
    run = RunState(
        "run",
        job_file(),
        registry.load("algorithms", "downpour"),
        Keyring(b"key"),
        EventContext(1.0),
        members,
    )
    return Registration(run, Past())


@pytest.mark.parametrize(
    ("peer", "message", "expected"),
    [
        (b"\x00one", m.Drained("worker-1"), "from worker-1"),
        (b"\x00one", m.Drained("worker-0"), "of worker-0 from worker-1"),
        (b"\x00two", m.ProcessExited("server-0", 1, -9, (), ""), "of server-0 from agent-0"),
        (
            b"else",
            m.LeaseRequest(1, 1, 0, False),
            "of worker-1 from a connection that is no daemon",
        ),
        (
            b"else",
            m.VectorResult(1, 0, 1, (0.0,)),
            "of server-0 from a connection that is no daemon",
        ),
        (b"else", m.Drained("\x1b[2J"), "from a connection that is no daemon"),
    ],
)
def test_a_refused_message_is_told_with_whom_it_is_about_and_who_sent_it(
    peer: bytes, message: m.Message, expected: str
) -> None:
    assert arrivals().whose(peer, message) == expected


def test_a_line_of_the_history_names_its_daemon_once_in_the_log() -> None:
    context = EventContext(1.0)
    context.event("error", "worker-0", "task.loss raised KeyError")
    context.event("exit", "worker-0", "worker-0 ended: exit 1")
    context.event("state", "", "starting")
    texts = [effect.text for effect in context.clear() if isinstance(effect, Note)]
    assert texts == ["worker-0: task.loss raised KeyError", "worker-0 ended: exit 1", "starting"]


def test_a_run_whose_method_has_an_empty_table_ends_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = registry.load("algorithms", "toy-table")
    empty = Table(name="seen", rule="add", size=lambda layout: 0)
    shape = replace(method.shape, tables=(MODEL, empty))
    monkeypatch.setattr(
        importlib.import_module("dlctl_toys.table"), "TABLE", replace(method, shape=shape)
    )
    outcome = Simulation(job_file(algorithm=("toy-table", {})), LeastSquares()).run()
    assert outcome.state == "failed"
    assert '"seen" has 0' in outcome.reason


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "most"), [("toy-ring", 512), ("downpour", 4096)])
def test_a_run_is_not_scaled_beyond_what_its_method_can_have(algorithm: str, most: int) -> None:
    servers = 0 if algorithm == "toy-ring" else 1
    simulation = Simulation(
        job_file(1, servers, algorithm=(algorithm, {}), epochs=16.0), LeastSquares()
    )
    asked = simulation.request(0.8, "scale", {"workers": most + 1})
    assert simulation.run().state == "finished"
    assert asked.reply is not None
    assert re.findall(r"\d+", asked.reply.error) == ["1", str(most), str(most + 1)]
