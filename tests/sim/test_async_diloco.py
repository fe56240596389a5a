"""Asynchronous DiLoCo in virtual time: the loop of the paper, and steps by each worker's speed."""

import numpy as np
import pytest
from simulated import job_file, rows_in_order

from dlctl.compress.base import Delta
from dlctl.optim.momentum import Momentum
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Push

STEPS, RATE = 4, 0.05


def job(workers: int = 1, *, dynamic: bool = False, steps: int = STEPS, **more):
    options = {"local_steps": steps, "dynamic_steps": dynamic, "inner_lr": RATE}
    outer = {"lr": 0.7, "momentum": 0.6, "every": workers}
    return job_file(
        workers=workers, algorithm=("async-diloco", options),
        optimizer=("delayed-nesterov", outer), **more,
    )  # fmt: skip


@pytest.mark.oracle("async-diloco", "DiLoCo on one machine, one replica")
def test_one_replica_is_diloco_on_one_machine(agree):
    problem = LeastSquares(samples=64)
    run = job(batch_size=8)
    outcome = Simulation(run, problem).run()
    theta = problem.initial()
    outer = in_memory(Momentum(Momentum.Options(lr=0.7, momentum=0.6, nesterov=True)), theta)
    batches = list(enumerate(rows_in_order(run, problem.samples, epochs=2)))
    for first in range(0, len(batches), STEPS):
        inner = theta.copy()
        for number, rows in batches[first : first + STEPS]:
            inner -= RATE * problem.gradient(inner, Batch(rows, 0, 1, number))[1]
        outer.apply(Delta(theta - inner))
    agree(outcome.weights, theta)


class Rounds(Checker):
    """How many steps each push of the parameters holds."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[int, int]] = {}
        """Slot -> number of the push -> steps."""

    def on_message(self, process, peer, message) -> None:
        if isinstance(message, Push) and message.table == 0 and message.samples:
            steps = message.last_step - message.first_step + 1
            self.steps.setdefault(message.slot, {})[message.seq] = steps


@pytest.mark.long
def test_a_worker_makes_steps_by_its_speed_and_all_push_as_often():
    problem = LeastSquares(samples=4096)
    rounds = Rounds()
    run = job(3, dynamic=True, steps=40, batch_size=4, epochs=2.0)
    compute = ComputeOptions(spread=0.0, slow={1: 2.0, 2: 5.0})
    outcome = Simulation(run, problem, compute=compute, checkers=[rounds]).run()
    assert outcome.state == "finished"
    usual = {slot: np.median([*steps.values()]) for slot, steps in rounds.steps.items()}
    assert usual == {0: 40, 1: 20, 2: 8}
    pushes = [len(steps) for steps in rounds.steps.values()]
    assert max(pushes) < 1.5 * min(pushes)


@pytest.mark.long
def test_several_replicas_come_to_the_loss_of_one_and_nobody_waits():
    problem = LeastSquares(samples=1024)
    losses, seconds = [], []
    for workers in (1, 4):
        run = job(workers, dynamic=True, batch_size=8, epochs=10.0)
        outcome = Simulation(run, problem, compute=ComputeOptions(slow={3: 4.0})).run()
        losses.append(problem.evaluate(outcome.weights)["loss"])
        seconds.append(outcome.seconds)
    assert max(losses) < 1e-3
    assert seconds[1] < 0.5 * seconds[0]
