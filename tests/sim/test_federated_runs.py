"""Federated averaging in virtual time: whole runs are the papers' loops over the same clients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracles import Agree
from scenarios import COMPUTE, HEAL_AT_S, TIMEOUTS, poor_network, recovery_faults
from simulated import Watcher, job_file

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.job.clients import Clients, cohort, cut
from dlctl.model.flat import slice_bounds
from dlctl.optim.sgd import SGD
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import LivenessChecker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire.messages import Array, Lease, PortionDone

CLIENTS, SAMPLES, BATCH, RATE, SEED = 8, 96, 4, 0.05, 3


def problem_of(kind: str = "dirichlet") -> LeastSquares:
    """Of clients whose labels are the sign of what they are to learn."""
    problem = LeastSquares(samples=SAMPLES)
    parts = cut(
        SAMPLES, CLIENTS, kind, alpha=0.3, seed=SEED, labels=lambda: (problem.y > 0).astype("i8")
    )
    problem.clients = Clients(parts, seed=SEED, shuffle=True)  # type: ignore[attr-defined]
    return problem


def job_of(workers: int = 3, servers: int = 2, **given: Any) -> Any:
    options = {"fraction": 0.5, "inner_lr": RATE} | given.pop("options", {})
    return job_file(
        workers, servers, algorithm=("fedavg", options), batch_size=BATCH, seed=SEED,
        **{"optimizer": ("sgd", {"lr": 1.0}), "epochs": 5.0} | given,
    )  # fmt: skip


def trained(
    problem: Any, w: Array, data_epoch: int, client: int, passes: int = 1, mu: float = 0.0
) -> tuple[Array, int]:
    """The way of one client from w, and its samples."""
    own, clients = w.copy(), problem.clients
    samples = clients.sizes[client] * passes
    steps = -(-samples // BATCH)
    for number in range(steps):
        rows = clients.rows(data_epoch, client, *slice_bounds(samples, steps, number))
        _, gradient = problem.gradient(own, Batch(rows, 0, 0, 0))
        own -= np.float32(RATE) * (gradient + np.float32(mu) * (own - w))
    return w - own, samples


def looped(problem: Any, optimizer: Any, drawn: int, epochs: int = 5, **how: Any) -> Array:
    """FedAvg, one client after the other."""
    w = problem.initial()
    outer = in_memory(optimizer, w.copy())
    for data_epoch in range(epochs):
        chosen = cohort(SEED, data_epoch, CLIENTS, drawn)
        ways = [trained(problem, w, data_epoch, int(client), **how) for client in chosen]
        in_all = sum(samples for _, samples in ways)
        mean = sum(way.astype("f8") * samples for way, samples in ways) / in_all
        outer.apply(Delta(mean.astype("f4")), in_all)
        w = outer.w.copy()
    return w


def run(job: Any, problem: Any, *checkers: Any, **given: Any) -> Outcome:
    promises = (TermsChecker(), LivenessChecker(8.0), NothingLeft(), *checkers)
    outcome = Simulation(job, problem, checkers=promises, **given).run(300.0)
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.oracle("fedavg", "the loops of FedAvg, FedProx, FedAdam, FedYogi")
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (("sgd", {"lr": 1.0}), {}),
        (("sgd", {"lr": 1.0}), {"passes": 3, "mu": 0.4}),
        (("adam", {"lr": 0.1}), {}),
        (("yogi", {"lr": 0.1}), {"mu": 1.0}),
    ],
    ids=["fedavg", "fedprox", "fedadam", "fedyogi"],
)
def test_a_run_is_the_loop_of_the_paper(
    optimizer: tuple[str, dict[str, Any]], how: dict[str, Any], agree: Agree
) -> None:
    """Whoever trains which client, on however many shards."""
    problem = problem_of()
    options = {"local_passes": how.get("passes", 1), "prox_mu": how.get("mu", 0.0)}
    rule = registry.load("optimizers", optimizer[0])
    expected = looped(problem, rule(rule.Options(**optimizer[1])), 4, **how)
    for workers, servers in ((1, 1), (3, 2)):
        job = job_of(workers, servers, options=options, optimizer=optimizer)
        weights = run(job, problem).weights
        agree(weights, expected, atol=5e-6)


def test_every_client_that_was_drawn_is_trained_once_and_workers_share_them() -> None:
    problem, leases, done = problem_of(), Watcher(Lease), Watcher(PortionDone)
    job = job_of(4, options={"clients_per_round": 6}, epochs=10.0)
    run(job, problem, leases, done, compute=ComputeOptions(step_s=0.2))
    given = Counter((le.data_epoch, le.shard) for *_, le in leases.sent if le.stop)
    expected = {(e, c) for e in range(10) for c in cohort(SEED, e, CLIENTS, 6)}
    assert given.keys() == expected
    samples = Counter[int]()
    for key, message in {(d.data_epoch, d.portion): d for *_, d in done.sent}.items():
        samples[key[0]] += message.samples
    for data_epoch, counted in samples.items():
        chosen = cohort(SEED, data_epoch, CLIENTS, 6)
        assert counted == sum(problem.clients.sizes[c] for c in chosen)  # type: ignore[attr-defined]
    assert len(done.sent) >= 60
    shares = Counter(d.slot for d in {(d.data_epoch, d.portion): d for *_, d in done.sent}.values())
    assert min(shares[slot] for slot in range(4)) >= 10


# ---------------------------------------------------------------- who is missing


def figures(outcome: Outcome) -> dict[str, Any]:
    return outcome.store.memory["lead"][1]


def test_a_deadline_ends_a_round_once_enough_clients_have_come() -> None:
    """worker-2 takes ten seconds for a client of half a second: its ways come too late."""
    slow = {"compute": ComputeOptions(step_s=0.1, spread=0.0, slow={2: 20.0})}
    took, updates = {}, {}
    for round_s in (0.0, 2.0):
        options = {"fraction": 1.0, "round_s": round_s, "clients_min": 3}
        done = Watcher(PortionDone)
        outcome = run(job_of(options=options, epochs=6.0), problem_of("iid"), done, **slow)
        took[round_s] = outcome.seconds
        updates[round_s] = figures(outcome)
        late = {d.slot for *_, d in done.sent if not d.samples}
        assert late == ({2} if round_s else set())
    assert took[2.0] < took[0.0] / 2
    assert updates[0.0]["rounds"] == 6
    assert updates[2.0]["rounds"] >= 5


def test_a_deadline_waits_for_clients_min() -> None:
    slow = ComputeOptions(step_s=0.1, spread=0.0, slow={2: 20.0})
    options = {"fraction": 1.0, "round_s": 2.0, "clients_min": CLIENTS}
    done = Watcher(PortionDone)
    run(job_of(options=options, epochs=2.0), problem_of("iid"), done, compute=slow)
    assert all(d.samples for *_, d in done.sent)


SEEDS = [range(2), *(pytest.param(range(n, n + 10), marks=pytest.mark.long) for n in (2, 12, 22))]


@pytest.mark.long
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_run_ends_with_a_good_model_whoever_dies(seeds: range) -> None:
    for seed in seeds:
        problem, options = problem_of(), {"fraction": 0.75, "local_passes": 2}
        if seed % 3 == 1:
            options |= {"round_s": 1.0, "clients_min": 2}
        job = job_of(
            4, options=options, epochs=12.0, restarts_max=20, timeouts=TIMEOUTS, checkpoint_s=0.6,
            durability=("process", "disk")[seed % 2],
        )  # fmt: skip
        promises = (TermsChecker(), LivenessChecker(HEAL_AT_S), NothingLeft())
        outcome = Simulation(
            job, problem, seed, network=poor_network(seed), compute=COMPUTE,
            faults=recovery_faults(seed), checkers=promises,
        ).run(300.0)  # fmt: skip
        assert outcome.state == "finished", (seed, outcome.reason)
        loss = problem.evaluate(outcome.weights)["loss"]
        assert loss <= 0.3 * problem.evaluate(problem.initial())["loss"], (seed, loss)


def test_a_resumed_run_is_the_one_that_was_not_stopped() -> None:
    problem, store = problem_of(), Store()
    run(job_of(epochs=2.0), problem, store=store)
    resumed = run(job_of(epochs=5.0), problem, store=store)
    whole = run(job_of(epochs=5.0), problem)
    np.testing.assert_allclose(resumed.weights, whole.weights, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- clients that stay where they are


@pytest.mark.long
def test_a_client_stays_with_its_worker() -> None:
    """Also when the worker dies: nobody else has the data, and its process begins anew."""
    problem, leases = problem_of(), Watcher(Lease)
    job = job_of(3, epochs=6.0, timeouts=TIMEOUTS, options={"fraction": 0.75})
    job = replace(job, data=replace(job.data, clients=CLIENTS, partition="workers"))
    expected = looped(problem, SGD(SGD.Options(lr=1.0)), 6, epochs=6)
    np.testing.assert_allclose(run(job, problem, leases).weights, expected, rtol=0, atol=2e-5)
    given = [(peer, lease) for *_, peer, lease in leases.sent if lease.stop]
    assert {lease.shard for _, lease in given} == set(range(CLIENTS))
    owners = {lease.shard: set() for _, lease in given}
    for peer, lease in given:
        owners[lease.shard].add(peer)
    assert all(len(peers) == 1 for peers in owners.values())
    assert len(set.union(*owners.values())) == 3
    for seed in range(4):
        outcome = Simulation(
            job, problem, seed, network=poor_network(seed), compute=COMPUTE,
            faults=recovery_faults(seed), checkers=(LivenessChecker(HEAL_AT_S), NothingLeft()),
        ).run(300.0)  # fmt: skip
        assert outcome.state == "finished", (seed, outcome.reason)
