"""Hosts that belong to a batch system: they come late, and may be taken away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.job.config import Allocated, Host, Launch
from dlctl.roles.coordinator.records import WantHosts
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import AgentWaits, HostsTaken
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import World
from dlctl.util.names import HOME_AGENT
from dlctl.wire.machine import Effect

HOSTS = (Host(ssh="h1"), Host(ssh="h2"))


def on_hosts() -> Simulation:
    problem = Ledger(shards=2, samples=1024, cells=300)
    job = job_file(
        workers=2, servers=2, optimizer=ACCOUNT, batch_size=8, portion_batches=2, epochs=2.0,
        hosts=HOSTS, timeouts={"silent_s": 3.0, "host_s": 20.0, "grace_s": 20.0},
    )  # fmt: skip
    return Simulation(
        job, problem, seed=0, faults=Faults(), compute=ComputeOptions(step_s=0.1, spread=0.1),
        checkers=ledger_checkers(problem, 2, once=False, heal_at_s=30.0),
    )  # fmt: skip


def on_jobs(
    places: int = 2, seed: int = 0, more: tuple[Checker, ...] = (), step_s: float = 0.1
) -> Simulation:
    """The servers stay, and each worker is on a host that comes and goes."""
    problem = Ledger(shards=1, samples=1024, cells=300)
    job = job_file(
        workers=2, servers=1, workers_min=1, optimizer=ACCOUNT, batch_size=8, portion_batches=2,
        epochs=2.0, timeouts={"silent_s": 3.0, "host_s": 20.0, "grace_s": 20.0},
    )  # fmt: skip
    own = Launch(name="slurm", options={"nodes": places}, places=(Allocated(servers=0),) * places)
    return Simulation(
        replace(job, launcher=own), problem, seed=seed, faults=Faults(),
        compute=ComputeOptions(step_s=step_s, spread=0.1),
        checkers=(*ledger_checkers(problem, 2, once=False, heal_at_s=60.0), *more),
    )  # fmt: skip


class HeldHosts(Checker):
    """Hosts are held for agents with workers only, and asked for as they change."""

    def __init__(self) -> None:
        self.wanted: list[tuple[str, ...]] = []
        self.held: list[set[str]] = []

    def at_start(self, world: World) -> None:
        self.world = world

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, WantHosts):
            self.wanted.append(effect.agents)

    def note(self) -> None:
        agents = self.world.batch.holds() - {HOME_AGENT}
        assert agents == {name for name in self.world.living("agent") if name != HOME_AGENT}
        self.held.append(agents)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 9))]
)
def test_a_host_is_held_for_as_long_as_it_has_workers(seed: int) -> None:
    """As `dlctl scale` changes their number, also while a host is away or the coordinator dies."""
    dice = np.random.default_rng([seed, 17])
    held = HeldHosts()
    simulation = on_jobs(places=3, seed=seed, more=(held,), step_s=0.25)
    batch = simulation.world.batch
    counts = [3, 1, int(dice.integers(1, 4))]
    for n, count in enumerate(counts):
        asked_s = 3.0 + 6.0 * n
        simulation.request(asked_s, "scale", {"workers": count})
        simulation.at(asked_s + 5.8, held.note)
        if seed:
            taken_s = asked_s + float(dice.uniform(-0.2, 3.0))
            simulation.at(taken_s, lambda: batch.take("agent-1"))
            simulation.at(taken_s + 0.8, lambda: batch.give("agent-1"))
    died_s = float(dice.uniform(4.0, 18.0))
    simulation.at(died_s, lambda: simulation.world.kill(COORDINATOR) if seed % 2 else None)
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert [len(agents) for agents in held.held] == counts
    assert held.wanted[0] == ("agent-1", "agent-2")
    assert not outcome.store.texts("lost"), "that is no failure"


def tell(simulation: Simulation, at_s: float, event: AgentWaits | HostsTaken) -> None:
    simulation.at(at_s, lambda: simulation.world.process(COORDINATOR).post(event))


def test_when_the_time_is_nearly_over_the_run_is_saved_and_stopped():
    simulation = on_hosts()
    tell(simulation, 3.0, HostsTaken("ending", "job 17 is about to reach its time limit"))
    outcome = simulation.run()
    assert outcome.state == "stopped"
    states = outcome.store.texts("state")
    assert states[-1].startswith("stopped: job 17 ")
    assert outcome.store.checkpoints, "it goes on from here"
    assert not outcome.world.living()


@pytest.mark.long
def test_before_the_hosts_are_taken_for_a_while_a_checkpoint_is_saved():
    simulation = on_hosts()
    tell(simulation, 3.0, HostsTaken("saving", "job 17 is about to lose its nodes"))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert len(outcome.store.checkpoints) == 2, "and the one at the end"
    (text,) = outcome.store.texts("notice")
    assert text.startswith("job 17 ")


def test_when_the_hosts_are_gone_the_run_has_failed_at_once_and_for_that_reason():
    simulation = on_hosts()

    def take() -> None:
        simulation.world.lose_host("agent-1")
        simulation.world.lose_host("agent-2")

    simulation.at(3.0, take)
    tell(simulation, 3.1, HostsTaken("over", "the Slurm job 17 was cancelled"))
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert "17" in outcome.store.texts("state")[-1]
    assert not outcome.world.living()


@pytest.mark.long
def test_an_agent_that_waits_in_a_queue_is_told_once_and_is_not_late():
    simulation = on_hosts()
    waits = AgentWaits("agent-2", 1, "job 17 is pending: Resources")
    for n in range(3):
        tell(simulation, 0.001 + n / 10_000, waits)
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert outcome.store.texts("waits") == [waits.why]


@pytest.mark.parametrize("make", [on_hosts, on_jobs])
def test_an_agent_that_ends_is_lost_unless_its_host_may_be_about_to_be_taken(make):
    """Its batch system says that a little later."""
    simulation = make()
    simulation.at(3.0, lambda: simulation.world.kill("agent-1"))
    outcome = simulation.run()
    assert outcome.state == "finished"
    lost = [text for text in outcome.store.texts("lost") if text.startswith("agent-1 on")]
    assert len(lost) == (1 if make is on_hosts else 0)
