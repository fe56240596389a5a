"""A run gets new keys while it goes on; whoever dies on the way, nothing is lost, nothing twice."""

from __future__ import annotations

import errno
import os

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.job import config
from dlctl.roles.coordinator.records import IssueTerm, KeyRenewed, Remember, RenewKey
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.keys import SimulatedKeys, public_of
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.world import KEY
from dlctl.wire.machine import Effect

pytestmark = pytest.mark.long

ROTATE_S = 1.0
EPOCHS = 4
PATIENCE_S = 4.0
SLOW_STEPS = ComputeOptions(step_s=0.05)
STEPS_BEFORE, STEPS_AFTER = 30, 60
"""So many effects after the request, and after the renewing of the key, somebody dies; the last
daemon has been started then."""
HOSTS = (config.Host(servers=1, workers=1), config.Host(ssh="b", servers=1, workers=2))


def simulation(
    checkers: tuple[Checker, ...] = (), hosts: tuple[config.Host, ...] = (), **options
) -> Simulation:
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        3, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(EPOCHS),
        timeouts={"resend_s": 0.3, "grace_s": 2.0}, hosts=hosts, **options,
    )  # fmt: skip
    promises = ledger_checkers(problem, EPOCHS, once=False, heal_at_s=8.0)
    return Simulation(job, problem, compute=SLOW_STEPS, checkers=(*promises, *checkers))


def rotate(sim: Simulation, when_s: float = ROTATE_S):
    """A command that asks for it; in the end it is ended, since the key that it has may be old."""
    old = sim.world.keys.fingerprint
    sim.at(when_s + PATIENCE_S, lambda: sim.world.kill("client-1"))
    return sim.request(when_s, "rotate", {"old": old, "by": "somebody"})


def keys_of(outcome: Outcome) -> dict[str, str]:
    """Name -> the public key of its newest process."""
    return {p.name: public_of(p.secret) for p in outcome.world.processes}


def require_new_keys(outcome: Outcome, number: int = 1) -> None:
    """Everybody has ended with a key of the new run key, its own."""
    for name, key in keys_of(outcome).items():
        if not name.startswith("client"):
            assert key == f"public key {number} of {name}"


class Die(Checker):
    """Kills `name` at the n-th effect of any coordinator, counted from the request; or from the
    renewing of the key, which is the first one then.
    """

    def __init__(self, name: str, at: int, is_renewing: bool) -> None:
        self.name = name
        self.left = at
        self.counts = not is_renewing

    def on_effect(self, process: Process, effect: Effect) -> None:
        if process.timeline.now < ROTATE_S or not process.name.startswith(COORDINATOR):
            return
        if isinstance(effect, IssueTerm | Remember):
            return  # What is to be remembered of one event is written in one transaction.
        self.counts |= isinstance(effect, RenewKey)
        self.left -= self.counts
        if self.left == 0 and self.counts:
            self.counts = False
            self.world.kill(self.name)

    def watch(self, sim: Simulation) -> None:
        self.world = sim.world


def test_a_run_gets_new_keys_and_goes_on_without_a_loss():
    sim = simulation()
    client = rotate(sim)
    outcome = sim.run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert client.reply is not None
    assert (client.reply.done, client.reply.error) == (True, "")
    require_new_keys(outcome)
    texts = outcome.store.texts("keys")
    assert texts[0].endswith("somebody")


def test_on_several_hosts_all_get_new_keys():
    sim = simulation(hosts=HOSTS)
    rotate(sim)
    outcome = sim.run(200.0)
    assert outcome.state == "finished", outcome.reason
    require_new_keys(outcome)


def rotated_while_one_dies(
    name: str, at: int, is_renewing: bool, hosts: tuple[config.Host, ...] = ()
) -> Outcome:
    die = Die(name, at, is_renewing)
    sim = simulation((die,), hosts)
    die.watch(sim)
    rotate(sim)
    outcome = sim.run(900.0)
    if outcome.state not in ("finished", "") and "agent-0" not in sim.world.living():
        # Coordinator and agent at once: nobody is left who could start the next one.
        sim.world.restart_coordinator(sim.world.past)
        outcome = sim.run(900.0)
    assert outcome.state == "finished", (at, outcome.reason)
    assert die.left <= 0, "it has not come so far"
    require_new_keys(outcome, outcome.store.key_number)
    return outcome


@pytest.mark.parametrize(
    "hosts",
    [pytest.param((), id="one host"), pytest.param(HOSTS, id="two hosts", marks=pytest.mark.long)],
)
def test_wherever_the_coordinator_dies_the_run_heals_by_itself(hosts):
    for at in range(1, STEPS_BEFORE, 8):
        rotated_while_one_dies(COORDINATOR, at, False, hosts)
    renewed = [
        rotated_while_one_dies(COORDINATOR, at, True, hosts).store.key_number
        for at in (*range(1, 8), *range(9, STEPS_AFTER, 12))
    ]
    assert renewed[0] in (0, 1), "killed just before; who has asked may have asked the next one"
    assert set(renewed[1:]) == {1}, "killed with the new key on the disk, and nobody told of it"


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["agent-0", "server-1", "worker-2"])
def test_whoever_else_dies_on_the_way_nothing_is_lost(name):
    for at in range(1, STEPS_BEFORE, 15):
        rotated_while_one_dies(name, at, False)
    for at in range(1, STEPS_AFTER, 20):
        rotated_while_one_dies(name, at, True)


def test_one_who_asks_the_next_coordinator_again_does_not_renew_the_key_twice():
    sim = simulation()
    rotate(sim)
    old = SimulatedKeys(KEY).fingerprint
    again = sim.request(ROTATE_S + 1.8, "rotate", {"old": old, "by": "somebody"})
    outcome = sim.run(200.0)
    assert outcome.state == "finished"
    assert outcome.store.key_number == 1
    assert again.reply is not None
    assert again.reply.result == {"phase": "done"}


def test_what_is_in_memory_only_is_not_given_up_for_new_keys():
    sim = simulation(durability="none")
    client = rotate(sim)
    outcome = sim.run(200.0)
    assert outcome.state == "finished"
    assert client.reply is not None
    assert "memory" in client.reply.error
    assert outcome.store.key_number == 0


def test_a_key_that_cannot_be_written_leaves_the_run_at_work_with_the_old_one():
    sim = simulation()
    client = rotate(sim)

    def fail(effect: RenewKey) -> None:
        sim.world.coordinator.post(KeyRenewed("No space left on device"))

    sim.at(0.5, lambda: sim.world.coordinator.perform(RenewKey, fail))
    outcome = sim.run(200.0)
    assert outcome.state == "finished"
    assert client.reply is not None
    assert os.strerror(errno.ENOSPC) in client.reply.error
    require_new_keys(outcome, 0)
