"""Workers that come from anywhere: they join, leave, are waited for, and are sent away."""

from __future__ import annotations

from typing import Any

import pytest
from guests import Guests
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.roles.protocol.context import EXIT_FENCED
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire import messages as m

LONG_S = 400.0
"""Longer than anything else is waited for."""


def run_of(
    own: int = 2,
    epochs: int = 8,
    algorithm: tuple[str, dict[str, Any]] = ("downpour", {}),
    **more: Any,
) -> Simulation:
    problem = Ledger(shards=2, cells=2000)
    job = job_file(
        own, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=float(epochs),
        algorithm=algorithm, timeouts={"silent_s": 6.0, "resend_s": 0.3}, **more,
    )  # fmt: skip
    compute = ComputeOptions(step_s=0.1, spread=0.4, build_s=0.1)
    checkers = ledger_checkers(problem, epochs, once=False, heal_at_s=2 * LONG_S)
    return Simulation(job, problem, 0, compute=compute, checkers=checkers)


def moments(outcome: Outcome, kind: str, daemon: str) -> list[float]:
    return [at for at, k, name, _ in outcome.store.events if (k, name) == (kind, daemon)]


def problems_of(simulation: Simulation) -> list[tuple[str, str]]:
    return [(p["code"], p["daemon"]) for p in simulation.store.run["problems"]]


def pushes_of(simulation: Simulation, pushes: Watcher, name: str) -> list[float]:
    return [at for at, source, _, _ in pushes.sent if source == name]


def watched(simulation: Simulation, *kinds: type) -> Watcher:
    watcher = Watcher(*kinds)
    simulation.world.observers.append(watcher)
    return watcher


def test_a_guest_trains_with_the_run_and_ends_with_it():
    simulation = run_of(workers_max=3)
    pushes = watched(simulation, m.Push)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert len(pushes.messages("worker-2")) > 20
    guest = simulation.world.process("guest-2")
    assert (guest.status, simulation.world.process("worker-2").status) == (0, 0)
    mirrored = outcome.store.mirrored["logs/worker-2.1.jsonl"]
    assert mirrored == simulation.world.process("worker-2").log


@pytest.mark.long
def test_that_a_guest_comes_crashes_or_vanishes_is_never_a_problem():
    simulation = run_of(epochs=20, workers_max=3)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    guests.kill(2.0, "alice", "worker")
    guests.vanish(5.0, "alice")
    seen: list[Any] = []
    for at_s in (0.7, 0.8, 1.0, 2.05, 2.5, 5.5, 8.0, 10.5, 12.0):
        simulation.at(
            at_s, lambda: seen.append((problems_of(simulation), simulation.store.run["state"]))
        )
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert seen == [([], "running")] * 9
    left = moments(outcome, "leave", "worker-2")
    assert left[0] == 2.0 or 2.0 < left[0] < 2.1  # Its guest has seen the crash.
    assert 10.0 <= left[1] <= 14.0  # Nobody has: it was silent for silent_s.


@pytest.mark.long
def test_a_guest_that_was_silent_for_too_long_returns_with_a_new_term():
    simulation = run_of(epochs=20, workers_max=3)
    joined = watched(simulation, m.Join)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    guests.freeze(3.0, "alice", for_s=8.0)
    outcome = simulation.run()
    terms = [message.term for message in joined.messages("worker-2")]
    assert outcome.state == "finished"
    assert sorted({*terms}) == [1, 2]
    assert moments(outcome, "join", "worker-2")[1] > 11.0


@pytest.mark.long
def test_more_guests_than_slots_wait_in_the_order_in_which_they_came():
    simulation = run_of(epochs=20, workers_max=3)
    lines = watched(simulation, m.InLine)
    guests = Guests(simulation)
    for number, name in enumerate(("alice", "bob", "carol")):
        guests.invite(0.5 + number, name)
        guests.join(0.6 + number, name)
    guests.stop(5.0, "alice")
    guests.stop(8.0, "bob")
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert {line.place for line in lines.messages()} == {1, 2}
    joins = [moments(outcome, "join", name)[0] for name in ("worker-2", "worker-3", "worker-4")]
    assert joins[0] < 1.0 < 5.0 < joins[1] < 6.5 < 8.0 < joins[2] < 9.5
    said = simulation.world.process("guest-4").last_lines
    assert any("waiting for a free slot, 2nd in line" in line for line in said)


def test_a_guest_that_leaves_pushes_what_it_has_first():
    simulation = run_of(workers_max=3, epochs=20)
    drained = watched(simulation, m.Drained)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    guests.stop(4.0, "alice")
    outcome = simulation.run()
    assert drained.messages("worker-2")
    assert simulation.world.process("worker-2").status == 0
    assert simulation.world.process("guest-2").status == 0
    assert moments(outcome, "leave", "worker-2")[0] < 6.0


def test_a_revoked_guest_is_gone_within_a_second_and_stays_away():
    simulation = run_of(workers_max=3, epochs=20)
    pushes = watched(simulation, m.Push)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    guests.revoke(4.0, "alice")
    guests.join(6.0, "alice")
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert moments(outcome, "leave", "worker-2")[0] < 4.1
    assert max(pushes_of(simulation, pushes, "worker-2")) < 5.0
    guest = next(p for p in simulation.world.processes if p.name == "guest-2")
    assert guest.status == EXIT_FENCED
    assert len(moments(outcome, "guest", "guest-2")) == 1


@pytest.mark.long
def test_a_revoked_worker_that_does_not_listen_pushes_in_vain():
    """It is frozen when it is revoked, so it does not hear of it; all its messages are refused."""
    simulation = run_of(workers_max=3, epochs=20)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    simulation.at(3.9, lambda: [p.freeze() for p in guests.living("alice")])
    acks = watched(simulation, m.Ack)
    simulation.at(3.9, lambda: simulation.world.network.cut("coordinator", "worker-2"))
    guests.revoke(4.0, "alice")
    simulation.run(until_s=12.0)
    network, worker = simulation.world.network, simulation.world.process("worker-2")
    taken = [at for at, _, peer, _ in acks.sent if network.client(peer) is worker]
    assert worker.alive
    assert len(taken) > 5
    assert max(taken) < 5.0


@pytest.mark.long
def test_an_invitation_survives_the_coordinator_and_expires_on_time():
    simulation = run_of(workers_max=3, epochs=40)
    guests = Guests(simulation)
    guests.invite(0.5, "alice", lasts_s=15.0)
    simulation.at(3.0, lambda: simulation.world.kill("coordinator"))
    guests.join(5.0, "alice")
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert moments(outcome, "join", "worker-2")[0] > 5.0
    assert 15.0 < moments(outcome, "leave", "worker-2")[0] < 16.0


@pytest.mark.long
def test_the_run_waits_for_guests_as_long_as_it_takes_and_says_so():
    simulation = run_of(own=1, workers_min=2, workers_max=3)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    seen: list[Any] = []
    simulation.at(
        LONG_S,
        lambda: seen.append(
            (
                simulation.store.run["state"],
                simulation.store.run["waiting"],
                problems_of(simulation),
            )
        ),
    )
    guests.join(LONG_S + 1.0, "alice")
    outcome = simulation.run(until_s=2 * LONG_S)
    assert seen == [("starting", "2 workers at least (1 there)", [("run-waiting", "run")])]
    assert outcome.state == "finished"
    assert outcome.seconds > LONG_S


@pytest.mark.long
def test_below_its_least_number_of_workers_a_run_pauses_until_one_returns():
    simulation = run_of(own=1, workers_min=2, workers_max=3, epochs=20)
    pushes = watched(simulation, m.Push)
    guests = Guests(simulation)
    guests.invite(0.1, "alice")
    guests.join(0.2, "alice")
    guests.stop(4.0, "alice")
    seen: list[Any] = []
    simulation.at(
        LONG_S, lambda: seen.append((simulation.store.run["state"], problems_of(simulation)))
    )
    guests.join(LONG_S, "alice")
    outcome = simulation.run(until_s=2 * LONG_S)
    assert outcome.state == "finished"
    assert seen == [("running", [("run-waiting", "run")])]
    assert not [at for at, _, _, _ in pushes.sent if 8.0 < at < LONG_S]


def test_who_is_not_invited_and_how_often():
    simulation = run_of(workers_max=3)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    again = simulation.request(1.0, "invite", {"name": "alice", "serial": "f" * 16, "expires": 4e9})
    odd = simulation.request(1.0, "invite", {"name": "../x", "serial": "f" * 16, "expires": 4e9})
    late = simulation.request(1.0, "invite", {"name": "bob", "serial": "f" * 16, "expires": 1.0})
    none = simulation.request(1.0, "revoke", {"name": "carol"})
    simulation.run()
    assert all(client.reply.done and client.reply.error for client in (again, odd, late, none))
    assert guests.invitation("alice") is not None


def test_nobody_joins_a_run_of_linked_workers_or_one_that_is_full():
    job = job_file(2, 0, algorithm=("gossip", {}), workers_max=3)
    linked = Simulation(job, LeastSquares(samples=64))
    full = run_of(own=2)
    for simulation in (full, linked):
        guests = Guests(simulation)
        guests.invite(0.5, "alice")
        simulation.run(until_s=2.0)
        assert guests.asked["alice"].reply.error


@pytest.mark.long
def test_new_keys_end_all_invitations():
    simulation = run_of(workers_max=3, epochs=30)
    guests = Guests(simulation)
    guests.invite(0.5, "alice")
    guests.join(0.6, "alice")
    simulation.request(3.0, "rotate", {"old": simulation.world.keys.fingerprint, "by": "test"})
    listed = simulation.request(8.0, "invitations", {})
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert [row["ended"] for row in listed.reply.result["invitations"]] == ["the run has new keys"]
    assert not [p for p in simulation.world.processes if p.name == "worker-2" and p.incarnation > 1]
