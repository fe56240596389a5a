"""DiLoCo on servers is DiLoCo on torch.distributed, replica for replica."""

from __future__ import annotations

import dataclasses
import multiprocessing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from diloco_loop import replica
from oracles import Agree
from simulated import Noted, job_file
from test_exact_resume import OfTorch

from daemons.worker.inner_optimizer import InnerOptimizer
from dlctl.job import config
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.sim.simulation import Simulation

WORKERS, STEPS, ROUNDS = 2, 4, 8
INNER = {"lr": 0.03, "betas": [0.9, 0.95], "weight_decay": 0.1}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
ENDS_S = 120


@pytest.mark.oracle("diloco", "Douillard 2023 in torch.distributed, gloo")
def test_two_workers_are_the_loop_of_the_paper_over_gloo(tmp_path: Path, agree: Agree) -> None:
    problem = Noted(samples=WORKERS * STEPS * 8 * ROUNDS // 2)
    job = job_file(
        WORKERS, 2, epochs=2.0, algorithm=("diloco", {"local_steps": STEPS}),
        inner=("adamw", INNER), optimizer=("momentum", OUTER),
    )  # fmt: skip
    data = config.Data(portion_batches=STEPS, lease_ahead_s=0.0)
    outcome = Simulation(
        dataclasses.replace(job, data=data), problem, inner=lambda choice: partial(OfTorch, choice)
    ).run()
    assert outcome.state == "finished", outcome.reason
    assert [len(problem.rows[slot]) for slot in range(WORKERS)] == [STEPS * ROUNDS] * WORKERS

    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch.distributed"])
    pipes, members = [], []
    for slot in range(WORKERS):
        here, there = forks.Pipe()
        pipes.append(here)
        of_paper = (problem.rows[slot], STEPS, problem.x, problem.y, INNER, OUTER)
        where = (there, slot, WORKERS, str(tmp_path / "store"))
        members.append(forks.Process(target=replica, args=(*where, *of_paper), daemon=True))
        members[-1].start()
    try:
        assert all(pipe.poll(ENDS_S) for pipe in pipes)
        ends = [pipe.recv() for pipe in pipes]
    finally:
        for member in members:
            member.kill()
            member.join()
    np.testing.assert_array_equal(ends[0], ends[1])
    agree(outcome.weights, ends[0], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- Muon inside

ROWS, COLUMNS = 4, 2
"""Of a matrix; the other parameters are a vector."""
MUON = {
    "lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "ns_steps": 5,
    "adamw": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1},
}  # fmt: skip
OF_MUON = {"lr": 0.7, "momentum": 0.6, "nesterov": True}


class Matrix(Noted):
    """Of its parameters the first ones are a matrix."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples=samples)
        matrix = TensorEntry("matrix", TRAINED, (ROWS, COLUMNS), "float32")
        rest = TensorEntry("rest", TRAINED, (12 - ROWS * COLUMNS,), "float32")
        self.layout = Layout((matrix, rest))


class OfMatrix(OfTorch):
    """Torch's optimiser of its two parameters."""

    def __init__(self, choice: config.Choice, parameters: np.ndarray) -> None:
        from torch import from_numpy

        self._inner = InnerOptimizer(choice, self._parts(from_numpy(parameters)))

    def step(self, gradient: np.ndarray, lr: float) -> None:
        from torch import from_numpy

        self._inner.step(self._parts(from_numpy(gradient)), lr)

    def _parts(self, vector):
        size = ROWS * COLUMNS
        return [vector[:size].view(ROWS, COLUMNS), vector[size:]]


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz (Jordan 2024)."""
    x = matrix.T / np.linalg.norm(matrix)  # No more rows than columns.
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T


class MuLoCo:
    """One replica's inner steps, in float64: Muon on the matrix, AdamW on the rest."""

    def __init__(self) -> None:
        self.momentum = np.zeros((ROWS, COLUMNS))
        self.mean, self.square = np.zeros(4), np.zeros(4)
        self.steps = 0

    def step(self, theta: np.ndarray, gradient: np.ndarray) -> None:
        size, lr = ROWS * COLUMNS, MUON["lr"]
        g = gradient[:size].reshape(ROWS, COLUMNS)
        self.momentum = 0.95 * self.momentum + g
        way = orthogonal(g + 0.95 * self.momentum) * np.sqrt(ROWS / COLUMNS)
        theta[:size] -= lr * (way.ravel() + 0.01 * theta[:size])
        g, rest = gradient[size:], theta[size:]
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * g
        self.square = 0.95 * self.square + 0.05 * g * g
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.95**self.steps)
        rest -= lr * (mean / (np.sqrt(square) + 1e-8) + 0.1 * rest)


@pytest.mark.long
@pytest.mark.oracle("diloco", "MuLoCo, Therien 2025, in float64: Muon inside")
def test_with_muon_inside_it_is_the_loop_of_muloco(agree: Agree) -> None:
    """Torch's Muon makes a matrix orthogonal in bfloat16, which has eight bits."""
    problem = Matrix(samples=WORKERS * STEPS * 8 * ROUNDS // 2)
    job = job_file(
        WORKERS, 2, epochs=2.0, algorithm=("diloco", {"local_steps": STEPS}),
        inner=("muon", MUON), optimizer=("momentum", OF_MUON),
    )  # fmt: skip
    data = config.Data(portion_batches=STEPS, lease_ahead_s=0.0)
    outcome = Simulation(
        dataclasses.replace(job, data=data), problem, inner=lambda choice: partial(OfMatrix, choice)
    ).run()
    assert outcome.state == "finished", outcome.reason

    theta, u = np.zeros(12), np.zeros(12)
    replicas = [MuLoCo() for _ in range(WORKERS)]
    for first in range(0, STEPS * ROUNDS, STEPS):
        ways = []
        for slot, inner in enumerate(replicas):
            local = theta.copy()
            for rows in problem.rows[slot][first : first + STEPS]:
                x, y = problem.x[rows], problem.y[rows]
                inner.step(local, x.T @ (x @ local - y) / len(rows))
            ways.append(theta - local)
        delta = np.mean(ways, axis=0)
        u = 0.6 * u + 0.7 * delta
        theta = theta - 0.6 * u - 0.7 * delta
    agree(outcome.weights, theta, atol=5e-3)
