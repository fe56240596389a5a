"""Local SGD in virtual time: one replica is the papers' loops on one machine."""

import numpy as np
import pytest
from simulated import ACCOUNT, Watcher, job_file, rows_in_order

from dlctl import jobfile
from dlctl.compress.base import Delta
from dlctl.optim.momentum import Momentum
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import OwnStepsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Array, PortionDone

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS, RATE = 3, 0.05


def local_sgd(steps: int, rate: float = RATE):
    return ("local-sgd", {"local_steps": steps, "inner_lr": rate})


# ---------------------------------------------------------------- one replica


@pytest.mark.oracle("local-sgd", "DiLoCo on one machine, one replica")
@pytest.mark.parametrize("servers", [1, 3])
def test_one_replica_is_diloco_on_one_machine_to_the_last_bit(servers, agree):
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
        inner = theta.copy()
        for number, rows in batches[first : first + STEPS]:
            inner -= RATE * problem.gradient(inner, Batch(rows, 0, 1, number))[1]
        outer.apply(Delta(theta - inner))
    agree(outcome.weights, theta)


@pytest.mark.oracle("local-sgd", "sync, where a round is one step")
def test_steps_of_one_and_a_mean_are_synchronous_sgd(agree):
    problem = LeastSquares(samples=128)
    alone = {"workers": 2, "batch_size": 8, "portion_batches": 1}
    local = job_file(**alone, algorithm=local_sgd(1, 0.1), optimizer=("sgd", {"lr": 1.0}))
    sync = job_file(**alone, algorithm=("sync", {}), optimizer=("sgd", {"lr": 0.1}))
    weights = [Simulation(job, problem).run().weights for job in (local, sync)]
    agree(*weights, atol=1e-6)


# ---------------------------------------------------------------- steps that become infinite


class GoesAstray(Ledger):
    """An account in which one step of worker-1, by its number, is infinite; its gradient is not."""

    def __init__(self, servers: int, number: int) -> None:
        super().__init__(shards=servers)
        self.number = number

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        if batch.slot == 1 and batch.number == self.number:
            gradient *= np.float32(1e19)
        return loss, gradient


@pytest.mark.per_commit(3)
@pytest.mark.usefixtures("heedless")
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("number", range(8, 16))
def test_wherever_in_a_round_a_step_becomes_infinite_the_replica_goes_on_without_it(
    servers, number
):
    """Before, between and after the slices of the mean that it does not wait for: the last of them
    takes as long as five of a round's eight steps.
    """
    problem, watcher = GoesAstray(servers, number), Watcher(PortionDone)
    method = {"local_steps": 8, "inner_lr": 4.0, "overlap": True}
    job = job_file(
        workers=3, servers=servers, batch_size=2, algorithm=("local-sgd", method),
        optimizer=ACCOUNT, epochs=8.0,
    )  # fmt: skip
    late = {(f"server-{servers - 1}", "worker-1"): SimLink(latency_s=0.1)}
    outcome = Simulation(
        job, problem, network=NetworkOptions(links=late), compute=ComputeOptions(step_s=0.02),
        checkers=(OwnStepsChecker(problem), watcher),
    ).run(600.0)  # fmt: skip
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    metrics = outcome.store.daemons["worker-1"]["metrics"]
    assert metrics["step"] > 32
    assert metrics["refused"] == 1
    losses = [done.loss_sum for done in watcher.messages("worker-1")]
    assert np.inf in losses, "portions that have ended in the lost round"


# ---------------------------------------------------------------- the job file


def test_without_an_optimizer_the_outer_step_is_diloco_s(tmp_path):
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.toml"
    path.write_text('job = { name = "a", task = "train.py:task" }\nalgorithm.name = "diloco"\n')
    chosen = jobfile.load(path).optimizer
    assert chosen.name == "momentum"
    assert chosen.options == NESTEROV | {"weight_decay": 0.0}
    path.write_text(path.read_text() + 'optimizer.name = "sgd"\n')
    assert jobfile.load(path).optimizer.name == "sgd"
