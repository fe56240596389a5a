"""Federated averaging in virtual time: whole runs are the papers' loops over the same clients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from simulated import Watcher, job_file

from dlctl import registry
from dlctl.clients import Clients, cohort, cut
from dlctl.compress.base import Delta
from dlctl.flat import slice_bounds
from dlctl.messages import Array, Lease, PortionDone
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import LivenessChecker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.problems import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

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
    optimizer: tuple[str, dict[str, Any]], how: dict[str, Any]
) -> None:
    """Whoever trains which client, on however many shards."""
    problem = problem_of()
    options = {"local_passes": how.get("passes", 1), "prox_mu": how.get("mu", 0.0)}
    rule = registry.load("optimizers", optimizer[0])
    expected = looped(problem, rule(rule.Options(**optimizer[1])), 4, **how)
    for workers, servers in ((1, 1), (3, 2)):
        job = job_of(workers, servers, options=options, optimizer=optimizer)
        weights = run(job, problem).weights
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-5)


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
