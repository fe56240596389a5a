"""Which hosts a run asks for, where they come and go: one for each agent that has workers."""

from __future__ import annotations

from training_coordinator import AtWork

from dlctl.job.config import Allocated, Launch
from dlctl.roles.coordinator.records import WantHosts
from dlctl.roles.protocol.effects import HostTaken
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect

EACH = Launch(name="batch", places=(Allocated(servers=0),) * 3)
STAYING = Launch(name="batch", places=(Allocated(),) * 3)


def wanted(effects: list[Effect]) -> list[tuple[str, ...]]:
    return [effect.agents for effect in effects if isinstance(effect, WantHosts)]


def scaled(run: AtWork, count: int) -> list[tuple[str, ...]]:
    """What is asked for when `dlctl scale` has been obeyed."""
    left = run.machine.scaling.scale(count, run.now)["leaving"]
    found = wanted(run.wait(2.0))
    for name in left:
        slot = int(name.rpartition("-")[2])
        found += wanted(run.hear(slot, m.Drained(name)))
        found += wanted(run.exits(slot, status=0))
    for daemon in run.machine.members.of_role("worker"):
        run.joins(daemon)
    return found + wanted(run.wait(2.0))


def test_hosts_are_asked_for_as_workers_come_and_go() -> None:
    run = AtWork(2, launcher=EACH)
    assert scaled(run, 2) == [], "that was said at the start"
    assert scaled(run, 3) == [("agent-1", "agent-2", "agent-3")]
    assert scaled(run, 4) == [], "two workers on one of them"
    assert scaled(run, 3) == []
    assert scaled(run, 1)[-1] == ("agent-1",)
    assert scaled(run, 2) == [("agent-1", "agent-2")]


def test_a_worker_that_is_to_start_again_keeps_its_host() -> None:
    run = AtWork(3, launcher=EACH)
    run.machine.scaling.restart(["worker-2"], run.now)
    found = wanted(run.hear(2, m.Drained("worker-2")))
    found += wanted(run.exits(2, status=0))
    assert found + wanted(run.wait(2.0)) == []


def test_hosts_that_stay_are_not_asked_for_one_by_one() -> None:
    assert scaled(AtWork(2, launcher=STAYING), 3) == []
    assert scaled(AtWork(2), 3) == []


def lose_host(run: AtWork, slot: int) -> None:
    agent = run.machine.members.agent_of(run.worker(slot))
    run.machine.handle(HostTaken(agent.name, agent.incarnation, True, "preempted"), run.now)


def test_a_worker_that_was_scaled_away_does_not_come_back_with_another_host() -> None:
    run = AtWork(3, launcher=EACH)
    assert run.machine.scaling.scale(2, run.now)["leaving"] == ["worker-2"]
    lose_host(run, 2)
    run.wait(2.0)
    names = [worker.name for worker in run.machine.members.of_role("worker")]
    assert names == ["worker-0", "worker-1"]
    assert run.works


def test_a_worker_that_is_restarted_waits_for_the_next_host() -> None:
    run = AtWork(3, launcher=EACH)
    run.machine.scaling.restart(["worker-2"], run.now)
    lose_host(run, 2)
    assert (run.worker(2).state, run.works) == ("queued", True)
