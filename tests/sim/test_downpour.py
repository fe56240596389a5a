"""Downpour SGD as in Dean et al. 2012, Alg. 1.1, run by the real roles in virtual time."""

import numpy as np
import pytest
import torch
from simulated import Spy, Watcher, job_file, rows_in_order

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.roles.protocol.effects import Compute
from dlctl.shards.base import Shard
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import Checker, FetchesChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, LeastSquares, Ledger, Logistic
from dlctl.sim.simulation import Simulation
from dlctl.wire.machine import Send
from dlctl.wire.messages import Fetch, Parameters, Push

ALONE = ("downpour", {"overlap": False, "inner_lr": 0.1})
"""With one worker this is the servers' optimiser on one machine."""
OPTIMIZERS = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1},
    "adam": {"lr": 0.05},
}


class FetchSteps(Checker):
    """At which steps a worker asks server-0 for parameters."""

    def __init__(self, worker: str = "worker-0") -> None:
        self.worker = worker
        self.steps: list[int] = []
        self._computed = 0

    def on_effect(self, process, effect):
        if process.name != self.worker:
            return
        if isinstance(effect, Compute):
            self._computed += 1
        elif isinstance(effect, Send) and isinstance(effect.message, Fetch):
            self.steps.append(self._computed)


# ---------------------------------------------------------------- it learns, and it is repeatable


@pytest.mark.long
def test_three_workers_and_two_servers_find_the_solution():
    problem = LeastSquares()
    job = job_file(workers=3, servers=2, optimizer=("adagrad", {"lr": 0.5}), epochs=10.0)
    outcome = Simulation(job, problem).run()
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert np.abs(outcome.weights - problem.solution).max() < 0.02


def test_workers_that_classify_reach_a_target():
    job = job_file(
        workers=3, optimizer=("sgd", {"lr": 0.5}), evaluate_epochs=0.5,
        target="accuracy >= 0.95", epochs=50.0,
    )  # fmt: skip
    outcome = Simulation(job, Logistic()).run()
    assert (outcome.state, outcome.reason) == (
        "finished",
        "the target accuracy >= 0.95 is reached",
    )


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    def run(seed: int):
        network = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.02, reorder=0.05))
        job = job_file(workers=3, servers=2, compression=("topk", {"density": 0.2}))
        return Simulation(job, LeastSquares(), seed, network=network).run()

    first, again, other = run(1), run(1), run(2)
    assert first.trace == again.trace
    assert np.array_equal(first.weights, again.weights)
    assert first.digest != other.digest


# ---------------------------------------------------------------- one worker is one machine


@pytest.mark.oracle("downpour", "the servers' optimiser on one machine")
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_the_optimiser_on_one_machine_to_the_last_bit(name, servers, agree):
    problem = LeastSquares(samples=200, size=7)
    job = job_file(
        servers=servers, algorithm=ALONE, optimizer=(name, OPTIMIZERS[name]), portion_batches=5
    )
    outcome = Simulation(job, problem).run()

    kind = registry.load("optimizers", name)
    w = problem.initial()
    shard = in_memory(kind(kind.Options(**OPTIMIZERS[name])), w)
    batches = rows_in_order(job, problem.samples, epochs=2)
    for number, rows in enumerate(batches):
        _, gradient = problem.gradient(w, Batch(rows, 0, 1, number))
        shard.apply(Delta(gradient))
    assert len(batches) == 50
    agree(outcome.weights, w)


@pytest.mark.oracle("downpour", "torch.optim: SGD, Adagrad, Adam")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_what_torch_does_up_to_one_rounding_a_step(name, agree):
    problem = LeastSquares(samples=200, size=7)
    job = job_file(algorithm=ALONE, optimizer=(name, OPTIMIZERS[name]), portion_batches=5)
    outcome = Simulation(job, problem).run()

    w = torch.zeros(7)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    optimizer = kinds[name]([w], **OPTIMIZERS[name])
    for number, rows in enumerate(rows_in_order(job, problem.samples, epochs=2)):
        w.grad = torch.from_numpy(problem.gradient(w.numpy(), Batch(rows, 0, 1, number))[1])
        optimizer.step()
    agree(outcome.weights, w.numpy(), atol=1e-6)


@pytest.mark.oracle("downpour", "torch: w -= lr * g, rounded twice")
def test_one_worker_is_sgd_in_torch_to_the_last_bit_where_nothing_is_fused(agree):
    """torch.optim.SGD rounds once where it has vector instructions for that."""
    problem = LeastSquares(samples=200, size=67)
    job = job_file(servers=2, algorithm=ALONE, portion_batches=5)
    outcome = Simulation(job, problem).run()

    w = torch.zeros(67)
    for number, rows in enumerate(rows_in_order(job, problem.samples, epochs=2)):
        w -= 0.1 * torch.from_numpy(problem.gradient(w.numpy(), Batch(rows, 0, 1, number))[1])
    agree(outcome.weights, w)


# ---------------------------------------------------------------- fetch and push intervals


def test_fetch_and_push_have_intervals_of_their_own_and_both_begin_at_step_0():
    options = {"overlap": False, "fetch_every_steps": 2, "push_every_steps": 3}
    fetches, pushes = FetchSteps(), Watcher(Push)
    job = job_file(algorithm=("downpour", options), portion_batches=7, epochs=1.0)
    Simulation(job, LeastSquares(samples=56), checkers=(fetches, pushes)).run()
    assert fetches.steps[:4] == [0, 2, 4, 6]
    steps = [(p.first_step, p.last_step) for p in pushes.messages()]
    assert steps == [(0, 0), (1, 3), (4, 6)]
    assert [p.samples for p in pushes.messages()] == [8, 24, 24]


def test_with_the_push_before_the_fetch_nothing_of_ones_own_is_missing_in_what_is_fetched():
    """Local steps at the servers' rate are what the servers do: a fetch changes nothing then."""

    class Fetched(Checker):
        """How far a fetch moves the parameters of the only replica."""

        def __init__(self) -> None:
            self.moved: list[float] = []

        def on_effect(self, process, effect):
            if isinstance(effect, Compute):
                mine, servers = process.machine.training.side.parameters, simulation.world.weights()
                self.moved.append(float(np.abs(mine - servers).max()))

    def run(push_before_fetch: bool) -> tuple[list[float], list[tuple[int, int]]]:
        nonlocal simulation
        options = {
            "overlap": False, "fetch_every_steps": 4, "push_every_steps": 4, "inner_lr": 0.1,
            "push_before_fetch": push_before_fetch,
        }  # fmt: skip
        fetched, pushes = Fetched(), Watcher(Push)
        job = job_file(algorithm=("downpour", options), optimizer=("sgd", {"lr": 0.1}), epochs=1.0)
        simulation = Simulation(job, LeastSquares(samples=128), checkers=(fetched, pushes))
        simulation.run()
        return fetched.moved, [(p.first_step, p.last_step) for p in pushes.messages()]

    simulation: Simulation
    moved, pushes = run(push_before_fetch=True)
    assert pushes == [(0, 3), (4, 7), (8, 11), (12, 15)]
    assert [moved[step] for step in (0, 4, 8, 12)] == [0, 0, 0, 0]
    assert moved[3] > 0
    assert moved[7] > 0
    moved, pushes = run(push_before_fetch=False)
    assert pushes == [(0, 0), (1, 4), (5, 8), (9, 12), (13, 15)]


def test_what_is_accrued_when_the_data_ends_is_pushed_too():
    pushes = Watcher(Push)
    job = job_file(algorithm=("downpour", {"push_every_steps": 4}), portion_batches=7, epochs=1.0)
    Simulation(job, LeastSquares(samples=56), checkers=(pushes,)).run()
    assert [p.samples for p in pushes.messages()] == [8, 32, 16]


def test_a_fetch_overwrites_local_steps_and_loses_none_of_their_gradients():
    class Local(Checker):
        """Which parameters each gradient is of, and what the server had then."""

        def __init__(self) -> None:
            self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

        def on_effect(self, process, effect):
            if isinstance(effect, Compute):
                worker = process.machine.training.side.parameters
                self.pairs.append((worker.copy(), simulation.world.weights()))

    local, problem = Local(), Spy(samples=64)
    options = {"overlap": False, "fetch_every_steps": 2, "push_every_steps": 4, "inner_lr": 0.2}
    job = job_file(algorithm=("downpour", options), optimizer=("sgd", {"lr": 0.1}), epochs=1.0)
    simulation = Simulation(job, problem, checkers=(local,))
    outcome = simulation.run()

    for step, (mine, servers) in enumerate(local.pairs):
        moved = servers - np.float32(0.2) * problem.given[step - 1] if step % 2 else servers
        assert np.array_equal(mine, moved)
    total = np.sum(problem.given, axis=0, dtype=np.float64)
    assert np.allclose(outcome.weights, -0.1 * total, rtol=1e-5)


def test_gradients_that_come_while_a_push_is_under_way_go_into_the_next_one():
    problem = Ledger(samples=64)
    pushes = Watcher(Push)
    job = job_file(algorithm=("downpour", {"push_every_steps": 2}), optimizer=("sgd", {"lr": 1.0}))
    slow = NetworkOptions(link=SimLink(latency_s=0.3))
    outcome = Simulation(job, problem, network=slow, checkers=(pushes,)).run()
    held = [int((p.delta.arrays[0] != 0).sum()) for p in pushes.messages()]
    assert held[:3] == [1, 2, 2]
    assert sum(held) == len(problem.authors) == 16
    assert problem.counts(outcome.weights).max() == 1
    assert problem.counts(outcome.weights).sum() == 16


def test_without_overlap_a_gradient_is_of_the_newest_parameters_and_with_it_of_older_ones():
    def staleness(overlap: bool) -> list[int]:
        pushes = Watcher(Push)
        job = job_file(algorithm=("downpour", {"overlap": overlap}), epochs=1.0)
        slow = NetworkOptions(link=SimLink(latency_s=0.015))
        Simulation(job, LeastSquares(), network=slow, checkers=(pushes,)).run()
        return [p.seq - p.base_version for p in pushes.messages()]

    assert set(staleness(overlap=False)) == {0}
    assert max(staleness(overlap=True)) > 1


# ---------------------------------------------------------------- shards


def test_shards_do_not_wait_for_each_other():
    class Versions(Checker):
        ahead = 0

        def on_effect(self, process, effect):
            if isinstance(effect, Send) and isinstance(effect.message, Parameters):
                machines = [simulation.world.machine(f"server-{k}") for k in (0, 1)]
                near, far = (machine.serving.shard.version for machine in machines)
                self.ahead = max(self.ahead, near - far)

    versions, problem = Versions(), Ledger(shards=2)
    links = {("worker-0", "server-1"): SimLink(latency_s=0.1)}
    job = job_file(servers=2, optimizer=("sgd", {"lr": 1.0}))
    simulation = Simulation(job, problem, network=NetworkOptions(links=links), checkers=(versions,))
    outcome = simulation.run()
    assert versions.ahead >= 3
    assert np.array_equal(*problem.counts(outcome.weights))


def test_one_replica_warms_the_servers_up_and_the_others_start_from_what_it_left():
    class First(Checker):
        """The parameters and the servers' Adagrad sums when each worker computes first."""

        def __init__(self) -> None:
            self.seen: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}

        def on_effect(self, process, effect):
            if isinstance(effect, Compute) and process.name not in self.seen:
                shard = simulation.world.machine("server-0").serving.shard
                self.seen[process.name] = (
                    simulation.world.machine("coordinator").progress.steps,
                    process.machine.training.side.parameters.copy(),
                    shard.slots["sum"].copy(),
                )

    first = First()
    job = job_file(
        workers=3,
        algorithm=("downpour", {"warmstart_steps": 20}),
        optimizer=("adagrad", {"lr": 0.1}),
        epochs=4.0,
    )
    simulation = Simulation(job, LeastSquares(), checkers=(first,))
    assert simulation.run().state == "finished"
    steps, parameters, sums = first.seen.pop("worker-0")
    assert steps == 0
    assert not parameters.any()
    assert not sums.any()
    for steps, parameters, sums in first.seen.values():
        assert steps >= 20
        assert parameters.all(), "it starts from the initial values"
        assert (sums > 0).all()


@pytest.mark.long
def test_a_slow_worker_does_not_hold_the_others_up():
    def seconds(slow: dict[int, float]) -> float:
        compute = ComputeOptions(step_s=0.05, spread=0.0, slow=slow)
        job = job_file(workers=4, portion_batches=1, epochs=8.0)
        return Simulation(job, LeastSquares(), compute=compute).run().seconds

    even, one_slow = seconds({}), seconds({3: 10.0})
    # Three workers do what four did, plus the slow one's last step.
    assert one_slow < even * 4 / 3 + 0.6


# ---------------------------------------------------------------- fetches of what has changed


@pytest.mark.long
@pytest.mark.parametrize("inner_lr", [0.0, 0.05])
def test_a_run_is_the_same_to_the_last_bit_whether_all_is_fetched_or_what_has_changed(
    inner_lr, monkeypatch
):
    def run():
        problem, fetches = Spy(size=200), FetchesChecker()
        job = job_file(
            workers=3, servers=2, algorithm=("downpour", {"inner_lr": inner_lr}),
            optimizer=("adagrad", {"lr": 0.1}), compression=("topk", {"density": 0.02}),
            epochs=3.0,
        )  # fmt: skip
        weights = Simulation(job, problem, checkers=(fetches,)).run().weights
        return weights, problem.given, fetches

    weights, gradients, fetches = run()
    assert fetches.sparse > 10 * fetches.whole
    monkeypatch.setattr(Shard, "changes_since", lambda *_: None)
    weights_of_all, gradients_of_all, fetches_of_all = run()
    assert fetches_of_all.sparse == 0
    assert np.array_equal(weights, weights_of_all)
    assert np.array_equal(gradients, gradients_of_all)
