"""Local SGD in virtual time: one replica is the papers' loops on one machine."""

import numpy as np
import pytest
from simulated import job_file, rows_in_order

from dlctl import jobfile
from dlctl.compress.base import Delta
from dlctl.optim.momentum import Momentum
from dlctl.shards.memory import in_memory
from dlctl.sim.problems import Batch, LeastSquares
from dlctl.sim.simulation import Simulation

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS, RATE = 3, 0.05


def local_sgd(steps: int, rate: float = RATE):
    return ("local-sgd", {"local_steps": steps, "local_lr": rate})


# ---------------------------------------------------------------- one replica


@pytest.mark.parametrize("servers", [1, 3])
def test_one_replica_is_diloco_on_one_machine_to_the_last_bit(servers):
    """16 batches are five whole rounds and one that the end of the data cuts short."""
    problem = LeastSquares(samples=64)
    job = job_file(
        servers=servers, batch_size=8, algorithm=local_sgd(STEPS), optimizer=("momentum", NESTEROV)
    )
    outcome = Simulation(job, problem).run()

    theta = problem.initial()
    outer = in_memory(Momentum(Momentum.Options(**NESTEROV)), theta)
    batches = list(enumerate(rows_in_order(job, problem.samples, epochs=2)))
    assert len(batches) % STEPS == 1
    for first in range(0, len(batches), STEPS):
        inner, delta = theta.copy(), np.zeros_like(theta)
        for number, rows in batches[first : first + STEPS]:
            way = RATE * problem.gradient(inner, Batch(rows, 0, 1, number))[1]
            inner -= way
            delta += way
        np.testing.assert_allclose(delta, theta - inner, rtol=0, atol=1e-6)
        outer.apply(Delta(delta))
    assert np.array_equal(outcome.weights, theta)


def test_steps_of_one_and_a_mean_are_synchronous_sgd():
    problem = LeastSquares(samples=128)
    alone = {"workers": 2, "batch_size": 8, "portion_batches": 1}
    local = job_file(**alone, algorithm=local_sgd(1, 0.1), optimizer=("sgd", {"lr": 1.0}))
    sync = job_file(**alone, algorithm=("sync", {}), optimizer=("sgd", {"lr": 0.1}))
    weights = [Simulation(job, problem).run().weights for job in (local, sync)]
    assert np.allclose(*weights, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- the job file


def test_without_an_optimizer_the_outer_step_is_diloco_s(tmp_path):
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.toml"
    path.write_text('job = { name = "a", task = "train.py:task" }\nalgorithm.name = "local-sgd"\n')
    chosen = jobfile.load(path).optimizer
    assert chosen.name == "momentum"
    assert chosen.options == NESTEROV | {"weight_decay": 0.0}
    path.write_text(path.read_text() + 'optimizer.name = "sgd"\n')
    assert jobfile.load(path).optimizer.name == "sgd"
