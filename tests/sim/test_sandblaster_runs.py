"""Sandblaster L-BFGS run by the real roles in virtual time: the result is one, whatever happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from simulated import job_file

from dlctl.sim.checkers import Checker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, layout_of
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

PORTIONS = 15
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"


class Portions(Checker):
    """Every portion of a batch is in every shard once when the batch is over, and no other is."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.batches = 0
        self.dropped = 0
        """Pushes that brought a portion for the second time, or too late."""
        self._last: dict[str, m.Push] = {}
        """Server -> the push that has come last."""
        self._applied: Counter[tuple[str, int, int]] = Counter()
        """(server, clock, portion) -> how often it was added."""

    def on_message(self, process, peer, message):
        if isinstance(message, m.Push):
            self._last[process.name] = message

    def on_effect(self, process, effect):
        if not isinstance(effect, Send):
            return
        message = effect.message
        if isinstance(message, m.Ack):
            # The push that it answers is the one that has just come: this method holds none.
            push = self._last[process.name]
            assert message.seq == push.seq
            if message.outcome == m.APPLIED:
                self._applied[process.name, push.clock, push.portion] += 1
            elif message.outcome == m.LATE:
                self.dropped += 1
        elif isinstance(message, m.VectorOp) and (message.x[0], message.y[0]) == ("accrued",) * 2:
            self._on_batch_over()

    def _on_batch_over(self):
        clock = max(clock for _, clock, _ in self._applied)
        assert len(self._applied) == self.servers * PORTIONS * (clock + 1)
        assert set(self._applied.values()) == {1}
        self.batches = clock + 1


def job(workers=3, servers=2, iterations=6, **options):
    method = {"iterations": iterations, "gradient_norm_min": 0.0}
    return job_file(
        workers, servers, algorithm=("sandblaster", method), batch_size=8, portion_batches=2,
        **options,
    )  # fmt: skip


def problem():
    return LeastSquares(samples=233, size=12)


def run(workers=3, servers=2, seed=0, faults=None, network=None, compute=None, **options):
    portions = Portions(servers)
    outcome = Simulation(
        job(workers, servers, **options), problem(), seed, faults=faults, network=network,
        compute=compute, checkers=(portions, TermsChecker(), NothingLeft()),
    ).run()  # fmt: skip
    return outcome, portions


@pytest.fixture(scope="module")
def undisturbed():
    outcome, portions = run()
    assert (outcome.state, outcome.reason) == ("finished", "6 iterations are done")
    assert portions.batches >= 7
    return outcome


@pytest.mark.long
def test_a_run_comes_to_the_minimum(undisturbed):
    task = problem()
    best = np.linalg.lstsq(task.x, task.y, rcond=None)[0]
    assert np.abs(undisturbed.weights - best).max() < 1e-2
    outcome, _ = run(iterations=20)
    np.testing.assert_allclose(outcome.weights, best, atol=1e-5)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (5, 1), (2, 4)])
def test_the_result_does_not_depend_on_the_number_of_workers_and_servers(
    undisturbed, workers, servers
):
    outcome, _ = run(workers, servers, seed=workers)
    assert np.abs(outcome.weights - undisturbed.weights).max() <= 1e-6


def test_a_worker_fetches_once_per_batch_and_the_coordinator_sends_no_vectors(undisturbed):
    network = undisturbed.network
    batches = network.messages["Push"] / (2 * PORTIONS)
    # One more fetch, for the evaluation at the end.
    assert network.messages["Fetch"] <= 2 * (3 * batches + 1)
    for kind in ("VectorOp", "VectorResult"):
        assert network.nbytes[kind] / network.messages[kind] < 128
    larger = Simulation(job(), LeastSquares(samples=233, size=600)).run()
    assert larger.network.nbytes["VectorOp"] < 1.5 * network.nbytes["VectorOp"]


def test_workers_wait_for_the_next_batch_without_polling(undisturbed):
    network = undisturbed.network
    portions = network.messages["Push"] / 2
    assert network.messages["LeaseRequest"] <= portions + 2 * 3
    computing_s = portions * 2 * 0.01 / 3
    assert undisturbed.seconds < 1.5 * computing_s + 1.0


@pytest.mark.oracle("sandblaster", "the same run, in which nobody dies")
@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    "moment",
    [
        Moment(name="worker-1", kind="Push", count=15),
        Moment(name="worker-1", kind="Push", count=16, before=True),
        Moment(name="worker-1", kind="Push", count=16),
        Moment(name="worker-2", kind="PortionDone", count=9, before=True),
        Moment(name="worker-2", kind="PortionDone", count=9),
        Moment(name="worker-0", kind="Lease", count=12, direction="received"),
        Moment(name="worker-0", kind="Parameters", count=5, direction="received"),
        Moment(name="worker-1", kind="PortionNoted", count=7, direction="received"),
    ],
    ids=lambda m: f"{m.kind}-{m.count}-{m.direction}{'-before' * m.before}",
)
def test_a_worker_that_dies_in_a_batch_changes_nothing(undisturbed, moment, agree):
    outcome, _ = run(faults=Faults(moments=(moment,)))
    assert outcome.state == "finished"
    assert outcome.store.texts("exit")
    agree(outcome.weights, undisturbed.weights, atol=1e-6)


@pytest.mark.long
def test_a_push_that_reached_one_shard_of_a_dead_worker_is_not_counted_twice_there(undisturbed):
    """The death between the two halves of a push: server-0 has the portion, server-1 has not."""
    dropped = 0
    for count in (9, 11, 13):
        moment = Moment(name="worker-1", kind="Push", count=count)
        links = {("worker-1", "server-1"): SimLink(latency_s=0.2)}
        outcome, portions = run(
            faults=Faults(moments=(moment,)), network=NetworkOptions(links=links)
        )
        assert np.abs(outcome.weights - undisturbed.weights).max() <= 1e-6
        dropped += portions.dropped
    assert dropped > 0


@pytest.mark.oracle("sandblaster", "the same run, in which nobody dies")
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_bad_network_and_deaths_change_nothing(undisturbed, seed, agree):
    link = SimLink(jitter_s=0.002, loss=0.03, duplicate=0.05, reorder=0.05, late_s=0.3)
    faults = Faults(kills=3, freezes=2, cuts=2, resets=2, heal_at_s=8.0)
    outcome, _ = run(seed=seed, faults=faults, network=NetworkOptions(link=link))
    assert outcome.state == "finished"
    agree(outcome.weights, undisturbed.weights, atol=1e-6)


class Digits:
    """Logistic regression of handwritten digits: ten classes, 64 pixels and one that is lit."""

    def __init__(self):
        with np.load(DIGITS) as file:
            pixels, digits = file["pixels"], file["labels"]
        self.samples = len(digits)
        self.x = np.hstack([pixels / 16, np.ones((len(digits), 1))])
        self.y = np.eye(10)[digits]
        self.layout = layout_of(self.x.shape[1] * 10)
        self.points = {}
        """Where gradients were computed, in order, each once."""

    def initial(self):
        return np.zeros(self.layout.size(), np.float32)

    def gradient(self, w, batch):
        self.points.setdefault(w.tobytes(), w.copy())
        x, y = self.x[batch.rows], self.y[batch.rows]
        scores = x @ w.reshape(-1, 10).astype(np.float64)
        logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        slope = x.T @ (np.exp(logs) - y) / len(y)
        return float(-(y * logs).sum() / len(y)), slope.astype(np.float32).ravel()

    def averaged(self, before, batch):
        return before

    def evaluate(self, w):
        guesses = (self.x @ w.reshape(-1, 10)).argmax(1)
        return {"accuracy": float((self.y[np.arange(self.samples), guesses]).mean())}


def way_over_digits(workers, *moments):
    """float32[points, d]: everywhere that a run goes until its tenth iteration."""
    digits = Digits()
    outcome = Simulation(
        job_file(
            workers, 2, algorithm=("sandblaster", {"iterations": 10}), batch_size=64,
            portion_batches=1,
        ), digits, faults=Faults(moments=moments), checkers=(TermsChecker(), NothingLeft()),
    ).run()  # fmt: skip
    assert outcome.reason.startswith("10 ")
    deaths = [*outcome.store.texts("exit"), *outcome.store.texts("recover")]
    assert len(deaths) == len(moments), deaths
    assert digits.evaluate(outcome.weights)["accuracy"] > 0.9
    return np.array([*digits.points.values()])


@pytest.fixture(scope="module")
def alone_over_digits():
    return way_over_digits(1)


KILLS = (
    Moment(name="worker-1", kind="Push", count=30),
    Moment(name="server-1", kind="VectorResult", count=20),
    Moment(name="coordinator", kind="VectorOp", count=60),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        pytest.param(
            3, KILLS, marks=pytest.mark.oracle("sandblaster", "1 worker, digits: 3 and kills")
        ),
        pytest.param(3, (), marks=pytest.mark.oracle("sandblaster", "1 worker, digits: 3 workers")),
        pytest.param(8, (), marks=pytest.mark.oracle("sandblaster", "1 worker, digits: 8 workers")),
    ],
)
def test_over_the_digits_every_point_is_that_of_one_worker(
    alone_over_digits, workers, kills, agree
):
    """Each of a worker, a server and the coordinator is killed once."""
    agree(way_over_digits(workers, *kills), alone_over_digits, atol=1e-5)


def test_a_slow_worker_costs_no_more_than_a_portion_per_batch(undisturbed):
    """Ten times slower: the others take the portions that it does not get to."""
    outcome, portions = run(compute=ComputeOptions(slow={1: 10.0}))
    assert np.abs(outcome.weights - undisturbed.weights).max() <= 1e-6
    a_portion_s = 2 * 10 * 0.01
    assert outcome.seconds < undisturbed.seconds * 1.5 + portions.batches * 1.5 * a_portion_s


@pytest.mark.long
def test_with_a_worker_ten_times_slower_eight_take_hardly_longer_than_they_must():
    """Twenty portions a worker and pass; the ideal is that none ever waits."""

    def seconds(slow):
        method = {"iterations": 2, "gradient_norm_min": 0.0}
        of_job = job_file(
            8, 2, algorithm=("sandblaster", method), batch_size=8, portion_batches=1
        )  # fmt: skip
        compute = ComputeOptions(step_s=0.1, slow=slow)
        return Simulation(of_job, LeastSquares(samples=1280), compute=compute).run().seconds

    ideal = seconds({}) * 8 / 7.1
    assert seconds({1: 10.0}) < 1.15 * ideal


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "kind"), [("worker-0", "Push"), ("worker-1", "Push"), ("coordinator", "VectorOp")]
)
def test_who_dies_while_there_are_backup_copies_changes_nothing(victim, kind, undisturbed):
    for count in (3, 8):
        killed = Faults(moments=(Moment(name=victim, kind=kind, count=count),))
        outcome, portions = run(compute=ComputeOptions(slow={1: 30.0}), faults=killed)
        assert outcome.state == "finished", outcome.reason
        assert np.abs(outcome.weights - undisturbed.weights).max() <= 1e-6
        assert portions.dropped


class Cliff(LeastSquares):
    """Beyond a line there is no loss: a row of the data cannot be computed there."""

    def gradient(self, w, batch):
        loss, gradient = super().gradient(w, batch)
        if 7 in batch.rows and float(np.abs(w).sum()) > 4.0:
            return float("nan"), gradient
        return loss, gradient


@pytest.mark.long
def test_a_batch_with_a_gradient_that_is_not_finite_is_a_point_too_far():
    cliff = Cliff(samples=233, size=12)
    assert np.abs(cliff.solution).sum() > 4.0
    outcome = Simulation(job(), cliff, checkers=(NothingLeft(),)).run()
    assert outcome.state == "finished"
    assert 3.0 < np.abs(outcome.weights).sum() <= 4.0


class Precipice(LeastSquares):
    """Beyond a line a row's gradient is larger than any server takes; its loss is quite small."""

    def gradient(self, w, batch):
        loss, gradient = super().gradient(w, batch)
        is_beyond = 7 in batch.rows and float(np.abs(w).sum()) > 4.0
        return loss, gradient * np.float32(1e12 if is_beyond else 1.0)


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("who", ["the worker", "the servers"])
def test_a_batch_of_which_a_portion_is_refused_is_a_point_too_far(who, request):
    """Its loss alone would be good, and its gradient lacks what `who` has refused."""
    if who == "the servers":
        request.getfixturevalue("heedless")
    precipice = Precipice(samples=233, size=12)
    assert np.abs(precipice.solution).sum() > 4.0
    outcome = Simulation(job(), precipice, checkers=(NothingLeft(),)).run()
    assert outcome.state == "finished"
    assert 3.0 < np.abs(outcome.weights).sum() <= 4.0


@pytest.mark.long
def test_the_time_that_the_job_gives_is_its_end():
    outcome, _ = run(iterations=10_000, seconds=3.0)
    assert (outcome.state, outcome.reason) == ("finished", "3 seconds are over")


@pytest.mark.long
def test_a_stopped_run_is_saved_and_goes_on_from_where_it_was(undisturbed):
    first = Simulation(job(iterations=1000), problem(), seed=1)
    first.request(2.5, "stop", {})
    outcome = first.run()
    assert outcome.state == "stopped"
    saved = outcome.store.files[outcome.store.newest()]
    assert saved["worker-0.safetensors"]["residual"].size == 0, "half a portion is worth nothing"
    second = Simulation(job(iterations=20), problem(), seed=2, store=outcome.store).run()
    assert second.state == "finished"
    task = problem()
    best = np.linalg.lstsq(task.x, task.y, rcond=None)[0]
    np.testing.assert_allclose(second.weights, best, atol=1e-5)


AT_RELEASE = Moment(name="coordinator", kind="LeaseRequest", count=1, direction="received")


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("dies", [False, True], ids=["", "the coordinator dies before the release"])
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("portion_batches", [1, 2, 3])
def test_a_run_that_ended_in_the_middle_of_a_batch_goes_on_with_other_servers_and_portions(
    undisturbed, servers, portion_batches, dies
):
    """The batch is gone on with, or begun anew where nobody can tell what is in it."""
    slow = {("worker-1", "server-1"): SimLink(latency_s=0.15)}
    first = Simulation(job(), problem(), seed=1, network=NetworkOptions(links=slow))
    first.request(1.3, "stop", {"grace_s": 0.0})
    store = first.run().store
    manifest = store.manifests[store.newest()]
    assert manifest["data"]["portions"], "a batch is under way"
    more = job_file(
        3, servers, batch_size=8, portion_batches=portion_batches,
        algorithm=("sandblaster", {"iterations": 6, "gradient_norm_min": 0.0}),
    )  # fmt: skip
    faults = Faults(moments=(AT_RELEASE,)) if dies else None
    second = Simulation(
        more, problem(), seed=2, store=store, faults=faults, checkers=(NothingLeft(),)
    ).run()
    assert (second.state, second.reason) == ("finished", "6 iterations are done")
    assert np.abs(second.weights - undisturbed.weights).max() <= 1e-6


class Noisy(LeastSquares):
    """A loss with dropout, or samples that are augmented at random."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rng = np.random.default_rng(3)

    def gradient(self, w, batch):
        loss, gradient = super().gradient(w, batch)
        return loss * (1.0 + 0.1 * self.rng.standard_normal()), gradient


@pytest.mark.long
@pytest.mark.parametrize("kill", [False, True])
def test_a_loss_that_depends_on_chance_is_a_problem_of_the_run_and_the_reason_of_its_end(kill):
    """Also if the coordinator is replaced after it was found."""
    simulation = Simulation(job(iterations=1000), Noisy(samples=233, size=12))
    seen, killed = [], []

    def look(at_s):
        codes = {problem["code"] for problem in simulation.world.store.run.get("problems", [])}
        if "loss-noisy" in codes:
            seen.append(at_s)
            if kill and not killed:
                killed.append(simulation.world.kill("coordinator"))

    for at_s in np.arange(1.0, 120.0, 0.2):
        simulation.at(at_s, lambda at_s=at_s: look(at_s))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert "chance" in outcome.reason
    assert len(seen) > 1
    assert bool(killed) == kill
