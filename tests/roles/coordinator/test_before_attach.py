"""Scripts that have not attached: they may take as long as they like, and status says so."""

from __future__ import annotations

from dlctl import registry
from dlctl.job.config import Choice, Job, JobFile, Timeouts, Workers
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.supervision.registration import BEFORE_ATTACH, Past
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Received, Started

READY_S, SILENT_S = 20.0, 5.0
AGENT, SCRIPT = b"agent-0", b"worker-0"


class Starting:
    """A run whose worker has a process, and nothing else so far."""

    def __init__(self, **what: str) -> None:
        job = JobFile(
            job=Job(name="own", **what),
            algorithm=Choice(name="local-sgd"),
            inner=Choice(name="script" if "script" in what else "sgd"),
            workers=Workers(count=1),
            timeouts=Timeouts(ready_s=READY_S, silent_s=SILENT_S),
        )
        method = registry.load("algorithms", job.algorithm.name)
        self.machine = Coordinator("run-1", job, Keyring(b"key"), method, Past())
        self.now = 1.0
        self.machine.handle(Started(), self.now)
        self.registers("agent-0", AGENT)
        self.spawned("server-0")
        self.registers("server-0", b"server-0")
        self.spawned("worker-0")

    def daemon(self, name: str) -> Daemon:
        return self.machine.members.daemons[name]

    def registers(self, name: str, peer: bytes) -> None:
        daemon = self.daemon(name)
        said = m.Register("run-1", daemon.role, name, daemon.incarnation, 7, "here", "0.1.0")
        self.machine.handle(Received(peer, said), self.now)

    def spawned(self, name: str) -> None:
        said = m.Spawned(name, self.daemon(name).incarnation, 7)
        self.machine.handle(Received(AGENT, said), self.now)

    def wait(self, seconds: float) -> None:
        """All who have registered send heartbeats."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for daemon in self.machine.members.daemons.values():
                if daemon.registered:
                    daemon.heard_at = self.now
            self.machine.handle(DeadlineReached(), self.now)

    @property
    def ends(self) -> str:
        end = self.machine.run.shutdown
        return end.reason if end is not None else ""


def test_a_run_waits_for_its_scripts_and_says_so() -> None:
    run = Starting(script="/x/train.py")
    run.wait(10 * READY_S)
    worker = run.daemon("worker-0")
    assert not run.ends
    assert (worker.state, worker.incarnation) == ("starting", 1)
    status, rows = run.machine.status.look(run.now)
    problem = next(p for p in status["problems"] if p["daemon"] == "worker-0")
    assert (problem["code"], problem["facts"]["phase"]) == ("daemon-starting", BEFORE_ATTACH)
    assert next(row for row in rows if row["name"] == "worker-0")["phase"] == BEFORE_ATTACH


def test_from_attach_on_the_usual_deadline_counts() -> None:
    run = Starting(script="/x/train.py")
    run.wait(10 * READY_S)
    run.registers("worker-0", SCRIPT)
    run.wait(READY_S - 2.0)
    assert not run.ends
    run.wait(6.0)
    assert run.ends.startswith("not ready in time; waiting for server-0, worker-0 (starting)")


def test_a_worker_with_a_task_has_to_register_in_time() -> None:
    run = Starting(task="/x/train.py:task")
    run.wait(READY_S + 2.0)
    assert run.ends.startswith("not ready in time")


def test_a_script_that_nobody_has_started_is_not_waited_for() -> None:
    run = Starting(script="/x/train.py")
    run.daemon("worker-0").pid = None
    run.wait(READY_S + 2.0)
    assert run.ends.startswith("not ready in time")


def test_a_replacement_may_take_long_too_while_the_run_trains() -> None:
    run = Starting(script="/x/train.py")
    run.machine.change_state("running", "", run.now)
    run.machine.release(run.now)
    run.wait(10 * READY_S)
    assert run.daemon("worker-0").incarnation == 1
    run.registers("worker-0", SCRIPT)
    run.wait(READY_S + 4.0)
    assert run.daemon("worker-0").killed_for.startswith("killed: not ready after 20 s")
