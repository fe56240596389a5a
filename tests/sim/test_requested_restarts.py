"""What is restarted on request comes back, the coordinator and its agent at once among it."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Outcome, Simulation

ALL = ("agent-0", COORDINATOR, "server-0", "server-1", "worker-0", "worker-1")
RESTART_S, EPOCHS = 1.0, 12


def simulation(compute: ComputeOptions | None = None) -> Simulation:
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(EPOCHS),
        timeouts={"resend_s": 0.3, "grace_s": 2.0},
    )  # fmt: skip
    promises = ledger_checkers(problem, EPOCHS, once=False, heal_at_s=8.0)
    return Simulation(
        job, problem, compute=compute or ComputeOptions(step_s=0.05), checkers=promises
    )


def incarnations(outcome: Outcome) -> dict[str, int]:
    found: dict[str, int] = {}
    for process in outcome.world.processes:
        found[process.name] = max(found.get(process.name, 0), process.incarnation)
    return found


@pytest.mark.parametrize("names", [ALL, ("agent-0", COORDINATOR), (COORDINATOR, "worker-0")])
def test_all_that_is_restarted_with_the_coordinator_comes_back_once(names):
    sim = simulation()
    client = sim.request(RESTART_S, "restart", {"names": list(names)})
    outcome = sim.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert client.reply is not None
    assert (client.reply.done, client.reply.error) == (True, "")
    expected = {name: 2 if name in names else 1 for name in ALL}
    assert {name: incarnations(outcome)[name] for name in ALL} == expected


@pytest.mark.long
def test_a_coordinator_that_exits_has_put_the_agent_that_starts_the_next_one_on_record():
    """Else commands would find no process of the run alive, and take it for failed."""
    sim, seen = simulation(), []
    sim.request(RESTART_S, "restart", {"names": list(ALL)})
    restart = sim.world.restart_coordinator

    def restart_and_look(*arguments: Any, **more: Any) -> None:
        agent = sim.world.store.daemons["agent-0"]
        seen.append((agent["incarnation"], agent["state"]))
        restart(*arguments, **more)

    sim.world.restart_coordinator = restart_and_look  # type: ignore[method-assign]
    sim.run(200.0)
    assert seen == [(2, "running")]


@pytest.mark.long
@pytest.mark.per_commit(2)
@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.1, 0.5])
def test_two_requests_one_after_the_other_do_not_meet_in_the_wrong_moment(pause_s):
    sim = simulation()
    sim.request(RESTART_S, "restart", {"names": ["agent-0"]})
    sim.request(RESTART_S + pause_s, "restart", {"names": [COORDINATOR]})
    outcome = sim.run(200.0)
    assert outcome.state == "finished", outcome.reason
    found = incarnations(outcome)
    assert (found["agent-0"], found[COORDINATOR]) == (2, 2)


@pytest.mark.long
def test_a_worker_that_hangs_does_not_keep_the_coordinator_for_ever():
    """It is killed after the grace, by the next one."""
    sim = simulation(ComputeOptions(step_s=0.05, slow={1: 200.0}))
    sim.request(RESTART_S, "restart", {"names": [COORDINATOR, "worker-1"]})
    outcome = sim.run(60.0)
    found = incarnations(outcome)
    assert (found[COORDINATOR], found["worker-1"]) == (2, 2)


@pytest.mark.long
@pytest.mark.per_commit(2)
@pytest.mark.parametrize("after_s", [0.2, 0.5, 1.0, 2.0])
def test_what_was_to_be_restarted_is_although_the_coordinator_dies(after_s):
    sim = simulation()
    sim.request(RESTART_S, "restart", {"names": [n for n in ALL if n != "agent-0"]})
    sim.at(RESTART_S + after_s, lambda: sim.world.kill(COORDINATOR))
    outcome = sim.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert all(incarnations(outcome)[name] >= 2 for name in ALL if name != "agent-0")


def test_a_run_that_is_to_end_does_not_go_on_because_its_coordinator_was_to_leave():
    sim = simulation()
    sim.request(RESTART_S, "restart", {"names": list(ALL)})
    sim.request(RESTART_S + 0.01, "stop", {"checkpoint": True, "grace_s": 5.0})
    outcome = sim.run(200.0)
    assert outcome.state == "stopped", outcome.reason
    assert incarnations(outcome)[COORDINATOR] == 1
