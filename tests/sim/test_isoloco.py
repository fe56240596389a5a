"""IsoLoCo against its loop in torch, on several servers; resumed with another number of them; and
while a server dies.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from oracles import Agree
from simulated import Noted, job_file

from dlctl.job import config
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store

WORKERS, STEPS, ROUNDS = 2, 4, 8
SHAPES = {"tall": (5, 3), "bias": (4,), "wide": (3, 4), "square": (3, 3)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
INNER_LR, OUTER = 0.05, {"lr": 0.6, "momentum": 0.8}


class Matrices(Noted):
    def __init__(self) -> None:
        super().__init__(samples=WORKERS * STEPS * 8 * ROUNDS // 2, size=SIZE)
        entries = (TensorEntry(n, TRAINED, shape, "float32") for n, shape in SHAPES.items())
        self.layout = Layout(tuple(entries))


def run(
    problem: Matrices, servers: int, *, epochs: float = 2.0, store: Store | None = None,
    victim: str = "",
) -> Outcome:  # fmt: skip
    job = job_file(
        WORKERS, servers, epochs=epochs, algorithm=("isoloco", {"local_steps": STEPS}),
        inner=("sgd", {"lr": INNER_LR}), optimizer=("isotropic", OUTER),
    )  # fmt: skip
    data = config.Data(portion_batches=STEPS, lease_ahead_s=0.0)
    simulation = Simulation(
        dataclasses.replace(job, data=data), problem, store=store or Store(),
        compute=ComputeOptions(step_s=0.1),
    )  # fmt: skip
    if victim:
        simulation.at(3.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome


def by_hand(problem: Matrices) -> np.ndarray:
    """The loop of its program, with the rows that each replica has had, in float64."""
    theta = torch.from_numpy(problem.initial().astype(np.float64))
    buffers = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()]
    sizes = [buffer.numel() for buffer in buffers]
    x, y = (torch.from_numpy(np.array(part, np.float64)) for part in (problem.x, problem.y))
    steps = min(len(problem.rows[slot]) for slot in range(WORKERS))
    for first in range(0, steps, STEPS):
        ways = []
        for slot in range(WORKERS):
            local = theta.clone().requires_grad_()
            inner = torch.optim.SGD([local], lr=INNER_LR)
            for rows in problem.rows[slot][first : first + STEPS]:
                inner.zero_grad()
                of = torch.from_numpy(rows.copy())
                error = x[of] @ local - y[of]
                (error @ error / (2 * len(rows))).backward()
                inner.step()
            ways.append(theta - local.detach())
        mean = torch.stack(ways).mean(0)
        done = []
        for part, buffer in zip(mean.split(sizes), buffers, strict=True):
            merged = part.view(buffer.shape)
            if merged.dim() == 2:
                u, s, vh = torch.linalg.svd(merged, full_matrices=False)
                merged = u @ torch.diag(torch.ones_like(s) * s.mean()) @ vh
            buffer.mul_(OUTER["momentum"]).add_(merged)
            done.append((merged + OUTER["momentum"] * buffer).ravel())
        theta = theta - OUTER["lr"] * torch.cat(done)
    return theta.numpy()


@pytest.mark.oracle("isoloco", "the loop of its program in torch, float64")
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_it_is_the_loop_of_its_program(servers: int, agree: Agree) -> None:
    problem = Matrices()
    outcome = run(problem, servers)
    assert [len(problem.rows[slot]) for slot in range(WORKERS)] == [STEPS * ROUNDS] * WORKERS
    agree(outcome.weights, by_hand(problem), atol=1e-5)


def test_a_run_goes_on_with_another_number_of_servers() -> None:
    """The sums of the outer steps move with their matrices."""
    store, problem = Store(), Matrices()
    run(problem, 2, epochs=1.0, store=store)
    outcome = run(problem, 3, store=store)
    assert np.allclose(outcome.weights, by_hand(problem), rtol=0, atol=1e-5)


def test_a_server_that_is_killed_goes_on_where_it_was() -> None:
    problem = Matrices()
    outcome = run(problem, 2, victim="server-1")
    assert outcome.world.machine("server-1").serving.term == 2
    assert np.allclose(outcome.weights, by_hand(problem), rtol=0, atol=1e-5)
