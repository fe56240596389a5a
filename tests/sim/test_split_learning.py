"""Split learning in virtual time: as one process learns, and SplitFed as its loop, whoever dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import job_file, rows_in_order

from dlctl.job.config import JobFile, Party
from dlctl.sim.divided import DividedLeastSquares
from dlctl.sim.faults import Faults
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Array

LR, BATCH, EPOCHS = 0.02, 4, 2


def parties_of(clients: int) -> tuple[Party, ...]:
    clinic = Party(name="clinic", role="client", task="a", host="local", workers=clients)
    return clinic, Party(name="lab", role="head", task="b", host="local")


def job_of(clients: int = 2, **options: Any) -> JobFile:
    return job_file(
        clients + 1, 2, algorithm=("split", options), optimizer=("momentum", {"lr": LR}),
        batch_size=BATCH, portion_batches=2, restarts_max=20, parties=parties_of(clients),
        epochs=float(EPOCHS),
    )  # fmt: skip


def run(job: JobFile, problem: DividedLeastSquares, faults: Faults | None = None) -> Outcome:
    outcome = Simulation(job, problem, seed=3, faults=faults).run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert not outcome.left_behind
    return outcome


def gradient(problem: DividedLeastSquares, w: Array, rows: Array) -> Array:
    """Of the whole model, float64."""
    shapes = [entry.shape for entry in problem.layout.entries]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    cut = [p.reshape(s) for p, s in zip(np.split(w, ends[:-1]), shapes, strict=True)]
    f, h = cut[0], cut[-1]
    t = cut[1] if problem.is_u else np.eye(h.shape[1])
    x, y = problem.x[rows].astype(float), problem.y[rows].astype(float)
    error = (x @ f @ h @ t - y) / len(rows)
    of = [x.T @ error @ t.T @ h.T, *([(x @ f @ h).T @ error] * problem.is_u)]
    return np.concatenate([g.ravel() for g in (*of, (x @ f).T @ error @ t.T)])


def in_one_process(problem: DividedLeastSquares, batches: list[Array]) -> Array:
    w, velocity = problem.initial().astype(float), 0.0
    for rows in batches:
        velocity = 0.9 * velocity + gradient(problem, w, rows)
        w = w - LR * velocity
    return w


@pytest.mark.oracle("split", "one process, in numpy, and kills of clients and the coordinator")
@pytest.mark.parametrize("shape", ["vanilla", "u"])
@pytest.mark.parametrize("kills", [0, 3])
def test_clients_in_turn_are_one_process(shape, kills, agree):
    problem = DividedLeastSquares(is_u=shape == "u")
    job = job_of(2, shape=shape)
    faults = Faults(kills=kills, coordinator_kills=kills and 1, from_s=0.4, heal_at_s=2.0)
    outcome = run(job, problem, faults if kills else None)
    batches = rows_in_order(job, problem.samples, EPOCHS)
    agree(outcome.weights, in_one_process(problem, batches), atol=1e-6)
