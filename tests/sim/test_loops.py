"""Training loops of the user's own in virtual time: they end up where tasks do, and each sample
counts once, however the loop cuts its batches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from simulated import Watcher, job_file

from dlctl.roles.protocol.loop_effects import KeepModel, LendModel
from dlctl.roles.worker import last_read
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.loops import LoopOptions, Trained
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.machine import Effect
from dlctl.wire.messages import Lease, PortionDone

SAMPLES = 64
METHODS: dict[str, dict[str, Any]] = {
    "downpour": {"inner_lr": 0.05},
    "sync": {},
    "local-sgd": {"local_steps": 5, "inner_lr": 0.05},
    "diloco": {"local_steps": 3, "inner_lr": 0.05},
    "ssp": {"inner_lr": 0.05},
}


class TrainedSamples(Watcher):
    """How often each sample was in a step of a loop: (data epoch, position) -> times."""

    def __init__(self) -> None:
        super().__init__(PortionDone)
        self.counts: Counter[tuple[int, int]] = Counter()
        self.clients: set[int] = set()
        """Portions of a step."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        super().on_effect(process, effect)
        if isinstance(effect, Trained) and not effect.is_skipped:
            self.clients.add(len({part[:2] for part in effect.pieces}))
            for part in effect.pieces:
                self.counts.update((part.data_epoch, n) for n in range(part.start, part.stop))


class Kept(Watcher):
    """Who was given the run's parameters at its end, and which."""

    def __init__(self) -> None:
        super().__init__(PortionDone)
        self.models: list[tuple[str, Any]] = []

    def on_effect(self, process: Process, effect: Effect) -> None:
        super().on_effect(process, effect)
        if isinstance(effect, KeepModel):
            self.models.append((process.name, effect.parameters.copy()))


def simulated(loop: LoopOptions, *checkers: Any, **job: Any) -> Simulation:
    compute = ComputeOptions(loop=loop, spread=0.0)
    problem = LeastSquares(samples=SAMPLES)
    return Simulation(job_file(has_loop=True, **job), problem, compute=compute, checkers=checkers)


def run(loop: LoopOptions, *checkers: Any, **job: Any) -> Outcome:
    return simulated(loop, *checkers, **job).run()


@pytest.mark.parametrize("name", METHODS)
def test_one_loop_with_the_batches_of_a_task_is_that_task_to_the_last_bit(name: str) -> None:
    job = {"algorithm": (name, METHODS[name]), "batch_size": 8, "servers": 2}
    task = Simulation(job_file(**job), LeastSquares(samples=SAMPLES)).run()
    loop = run(LoopOptions(batch_size=8, lr=0.05), **job)
    assert task.state == loop.state == "finished"
    assert np.array_equal(task.weights, loop.weights)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64, 100])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_sample_is_trained_once_whatever_the_batches_are(
    batch_size: int, accumulate: int
) -> None:
    trained = TrainedSamples()
    loop = LoopOptions(batch_size=batch_size, accumulate=accumulate)
    outcome = run(loop, trained, workers=3, algorithm=("local-sgd", {"local_steps": 4}), epochs=2.0)
    assert outcome.state == "finished"
    assert trained.counts == Counter({(e, n): 1 for e in range(2) for n in range(SAMPLES)})
    assert sum(done.samples for done in trained.messages()) == 2 * SAMPLES


@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_step_is_of_two_clients_and_the_last_client_ends_the_round(accumulate: int) -> None:
    trained = TrainedSamples()
    loop = LoopOptions(batch_size=7, accumulate=accumulate, ahead=6)
    outcome = run(loop, trained, workers=1, algorithm=("fedavg", {"fraction": 1.0}), epochs=3.0)
    assert outcome.state == "finished"
    assert trained.counts == Counter({(e, n): 1 for e in range(3) for n in range(SAMPLES)})
    assert trained.clients == {1}


class FirstSteps(Watcher):
    """Whether the first step of each client began where a client does."""

    def __init__(self) -> None:
        super().__init__(PortionDone)
        self.fresh: dict[tuple[int, int], bool] = {}
        self._is_fresh = False

    def on_effect(self, process: Process, effect: Effect) -> None:
        super().on_effect(process, effect)
        if isinstance(effect, LendModel):
            self._is_fresh = effect.fresh
        if isinstance(effect, Trained) and not effect.is_skipped:
            self.fresh.setdefault(effect.pieces[0][:2], self._is_fresh)


def test_a_client_whose_last_step_is_skipped_does_not_train_on_the_data_of_the_next() -> None:
    first = FirstSteps()
    loop = LoopOptions(batch_size=3, skips=0.5, ahead=6)
    run(loop, first, workers=1, algorithm=("fedavg", {"fraction": 1.0}), epochs=3.0)
    assert len(first.fresh) == 6
    assert all(first.fresh.values())


def test_the_samples_of_skipped_steps_are_done_and_not_counted() -> None:
    trained = TrainedSamples()
    outcome = run(LoopOptions(batch_size=4, skips=0.4), trained, algorithm=("sync", {}), epochs=2.0)
    assert outcome.state == "finished"
    counted = sum(done.samples for done in trained.messages())
    assert counted == trained.counts.total() < 2 * SAMPLES


@pytest.mark.parametrize("stop", [{"samples": 300}, {"steps": 50}])
def test_data_of_its_own_is_counted_until_the_run_has_enough(stop: dict[str, int]) -> None:
    done = Watcher(PortionDone)
    job = {"workers": 2, "algorithm": ("local-sgd", {"local_steps": 7}), **stop}
    outcome = run(LoopOptions(own_samples=6), done, **job)
    assert outcome.state == "finished"
    messages = done.messages()
    counted = {"samples": sum(m.samples for m in messages), "steps": sum(m.steps for m in messages)}
    assert counted["samples"] == 6 * counted["steps"]
    ((kind, wanted),) = stop.items()
    assert wanted <= counted[kind] < 2 * wanted


@pytest.mark.parametrize(("local_steps", "samples"), [(1, 6), (7, 40), (50, 6), (50, 40)])
def test_data_of_its_own_exceeds_the_end_by_a_round_and_a_portion(
    local_steps: int, samples: int
) -> None:
    """And by a step or two, while a lease is on its way."""
    done, leased = Watcher(PortionDone), Watcher(Lease)
    workers, wanted = 4, 300
    run(
        LoopOptions(own_samples=samples), done, leased, workers=workers, samples=wanted,
        algorithm=("local-sgd", {"local_steps": local_steps}),
    )  # fmt: skip
    portion = max(lease.stop - lease.start for lease in leased.messages())
    counted = sum(message.samples for message in done.messages())
    assert wanted <= counted <= wanted + workers * ((local_steps + 2) * samples + portion)


@pytest.mark.long
def test_an_evaluation_that_takes_long_is_an_evaluation_in_the_status() -> None:
    compute = ComputeOptions(loop=LoopOptions(), step_s=0.02, evaluate_s=300.0)
    job = job_file(workers=2, epochs=3.0, evaluate_epochs=1.0, has_loop=True)
    row = Simulation(job, LeastSquares(samples=256), compute=compute).run(100.0).store.daemons
    assert (row["worker-0"]["state"], row["worker-0"]["phase"]) == ("running", "evaluating")


def test_a_stop_does_not_wait_for_the_end_of_a_round() -> None:
    """A round takes 100 seconds; the loop is asked for its model in the middle of it."""
    simulation = simulated(
        LoopOptions(own_samples=1),
        algorithm=("local-sgd", {"local_steps": 10_000}),
        samples=100_000,
    )
    simulation.request(20.0, "stop", {})
    outcome = simulation.run(60.0)
    assert outcome.state == "stopped"
    assert outcome.seconds < 22.0


@pytest.mark.parametrize("name", ["downpour", "local-sgd", "easgd"])
def test_the_first_worker_is_given_the_parameters_of_the_end(name: str) -> None:
    """What its script saves is the run's model, not its own replica."""
    kept = Kept()
    job = {"workers": 3, "servers": 2, "algorithm": (name, METHODS.get(name, {}))}
    outcome = run(LoopOptions(batch_size=5), kept, **job)
    assert outcome.state == "finished"
    assert [name for name, _ in kept.models] == ["worker-0"]
    assert np.array_equal(kept.models[0][1], outcome.weights)


def test_a_worker_does_not_wait_for_the_last_parameters_of_servers_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No answer comes in time: the run ends as ever, and the replica's own values are kept."""
    monkeypatch.setattr(last_read, "READ_S", 0.0)
    kept = Kept()
    job = {"workers": 2, "algorithm": ("downpour", METHODS["downpour"])}
    outcome = run(LoopOptions(batch_size=5), kept, **job)
    assert outcome.state == "finished"
    assert kept.models == []
