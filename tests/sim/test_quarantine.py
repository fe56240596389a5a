"""A worker that computes what nobody can use is taken out; the others go on without it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated import job_file, ledger_checkers

from dlctl.algorithms.rounds import DISCARDED_MAX
from dlctl.problems import cause_in
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.util.text import REFUSED
from dlctl.wire.messages import HELD, Ack, Array

STEPS = ComputeOptions(step_s=0.02)
HUGE = 1e12
SAMPLES = re.compile(r"samples (\d+)\.\.(\d+) of the order of epoch 0")
BARRIERS = [("sync", {}), ("local-sgd", {}), ("local-sgd", {"overlap": True})]
every_barrier = pytest.mark.parametrize("method", BARRIERS, ids=["sync", "local-sgd", "overlap"])


class BadHost(LeastSquares):
    """What slot 1 computes is of no use: NaN, or finite and far too large, in `where` of it."""

    def __init__(self, value: float, where: slice = slice(None)) -> None:
        super().__init__()
        self.value = value
        self.where = where
        self.is_mended = False

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        if batch.slot == 1 and not self.is_mended:
            gradient = np.zeros_like(gradient)
            gradient[self.where] = self.value
        return loss, gradient


METHODS = [
    ("downpour", {}),
    ("downpour", {"fetch_every_steps": 4, "push_every_steps": 4}),
    *BARRIERS,
]
must_refuse = pytest.mark.usefixtures("heedless")
every_method = pytest.mark.parametrize(
    "method", METHODS, ids=["downpour", "rarely", "sync", "local-sgd", "overlap"]
)


@pytest.mark.per_commit(1)
@every_method
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.nan, r"pushed: gradient of norm nan \(its loss is \S+\), samples \d+"),
        (
            HUGE,
            r"pushed: gradient of norm \S+, above what .+push_norm_max allows \(.+ samples \d+",
        ),
    ],
    ids=["nan", "huge"],
)
def test_one_poisoned_worker_is_quarantined_and_the_others_finish(value, why, method) -> None:
    job = job_file(workers=3, servers=2, nonfinite_steps_max=5, algorithm=method, epochs=8.0)
    outcome = Simulation(job, BadHost(value), compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    (text,) = outcome.store.texts("quarantine")
    assert (text.split()[0], cause_in(text)) == ("worker-1", "not finite")
    row = outcome.store.daemons["worker-1"]
    assert row["state"] == "quarantined"
    assert re.search(why, "\n".join(row["last_exit"]["last_lines"]))
    assert np.abs(outcome.weights).max() < 10.0
    workers = [p for p in outcome.world.processes if p.name == "worker-1"]
    assert len(workers) == 1, "it was not replaced"


@pytest.mark.long
def test_why_a_worker_is_quarantined_outlives_the_coordinator() -> None:
    job = job_file(workers=3, servers=2, nonfinite_steps_max=5, epochs=400.0)
    compute = ComputeOptions(step_s=0.1)
    simulation = Simulation(job, BadHost(np.nan), compute=compute)
    simulation.at(4.0, lambda: simulation.world.kill("coordinator"))
    simulation.request(10.0, "stop", {})
    outcome = simulation.run()
    assert simulation.world.coordinator.incarnation == 2
    row = outcome.store.daemons["worker-1"]
    assert row["state"] == "quarantined"
    assert cause_in(row["error"]) == "not finite"


class Known(BadHost):
    """Remembers what slot 1 has computed with: the numbers of the samples, batch by batch."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.batches: list[list[int]] = []

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        if batch.slot == 1:
            self.batches.append(batch.rows.tolist())
        return super().gradient(w, batch)


@must_refuse
def test_the_batches_of_refused_pushes_are_named_in_the_last_words_of_their_worker() -> None:
    """Which `status` shows: whoever looks for the cause finds the samples. The first push is of one
    batch, the next ones of two.
    """
    problem = Known(HUGE)
    method = ("downpour", {"push_every_steps": 2})
    job = job_file(workers=3, algorithm=method, epochs=8.0)
    outcome = Simulation(job, problem, compute=STEPS).run()
    order = np.random.default_rng([job.job.seed, 0]).permutation(problem.samples)
    lines = outcome.store.daemons["worker-1"]["last_exit"]["last_lines"]
    named = [
        [order[int(lo) : int(hi) + 1].tolist() for lo, hi in SAMPLES.findall(line)]
        for line in lines
        if line.startswith("WARNING server-0 refused a push (samples ")
    ]
    assert [len(push) for push in named] == [1, 2, 2]
    assert [batch for push in named for batch in push] == problem.batches[:5]


class Stumbles(LeastSquares):
    """One gradient in the run is as large as a server still takes: who makes a step of its own with
    it is out of range. The servers' optimiser makes a small step of it.
    """

    def __init__(self, bad_batch: int) -> None:
        super().__init__()
        self.bad_batch = bad_batch
        self.batches = 0

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        self.batches += 1
        if self.batches == self.bad_batch:
            return loss, np.full_like(gradient, 2e8)
        return (loss if np.abs(w).max() < 1e6 else np.nan), gradient


OWN_STEPS = {"downpour": {"fetch_every_steps": 10}, "local-sgd": {"local_steps": 16}}


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("bad_batch", [30, 35, 44])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", OWN_STEPS)
def test_who_has_ruined_itself_by_its_own_steps_goes_on_from_what_the_servers_have(
    name, overlap, bad_batch
):
    """What is not finite is no step, so none would lead to a fetch or a round's end. What a fetch
    has brought in part before the bad step is ruined with the rest.
    """
    method = name, {"inner_lr": 0.01, "overlap": overlap, **OWN_STEPS[name]}
    optimizer = ("adagrad", {"lr": 0.1})
    job = job_file(workers=2, servers=2, algorithm=method, optimizer=optimizer, epochs=8.0)
    slow = {("server-1", f"worker-{i}"): SimLink(latency_s=0.5) for i in (0, 1)}
    network = NetworkOptions(link=SimLink(latency_s=0.05), links=slow)
    problem = Stumbles(bad_batch)
    outcome = Simulation(job, problem, compute=STEPS, network=network).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert outcome.store.texts("quarantine") == []
    rows = [outcome.store.daemons[f"worker-{i}"]["metrics"] for i in (0, 1)]
    assert sum(row["nonfinite_steps"] for row in rows) <= DISCARDED_MAX + 2
    assert np.abs(outcome.weights).max() < 10.0


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_data_that_is_nan_now_and_then_costs_no_round(overlap) -> None:
    """Several in a row are still the data's: the steps of the round are sound."""

    class Tenth(LeastSquares):
        def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
            loss, gradient = super().gradient(w, batch)
            is_bad = np.random.default_rng([batch.slot, batch.number]).random() < 0.1
            return (np.nan if is_bad else loss), gradient

    method = ("local-sgd", {"local_steps": 256, "inner_lr": 0.01, "overlap": overlap})
    job = job_file(workers=2, algorithm=method, optimizer=("sgd", {"lr": 1.0}), epochs=60.0)
    outcome = Simulation(job, Tenth(), compute=STEPS).run(600.0)
    assert outcome.state == "finished"
    rows = [outcome.store.daemons[f"worker-{i}"]["metrics"] for i in (0, 1)]
    assert all(row["nonfinite_steps"] > 50 for row in rows)
    assert [row["refused"] for row in rows] == [0, 0]


@pytest.mark.long
@pytest.mark.per_commit(1)
@must_refuse
@pytest.mark.parametrize("method", [("downpour", {}), ("sync", {})], ids=["downpour", "sync"])
def test_refusals_by_one_of_two_servers_only_are_in_a_row_too(method) -> None:
    """Of one layer that explodes the other server never hears: it takes every push."""
    problem = BadHost(HUGE, where=slice(6, None))
    job = job_file(workers=3, servers=2, algorithm=method, epochs=8.0)
    outcome = Simulation(job, problem, compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    (text,) = outcome.store.texts("quarantine")
    assert (text.split()[0], REFUSED in text) == ("worker-1", True)
    assert refused(outcome)["server-0"] == 0


@pytest.mark.long
@must_refuse
@pytest.mark.parametrize("overlap", [False, True])
def test_who_only_makes_infinite_steps_is_quarantined_although_it_pushes_none(overlap) -> None:
    """Each of its gradients is finite, and all that it does in a round is not."""
    problem = BadHost(1.5e19, where=slice(1))
    method = ("local-sgd", {"inner_lr": 0.1, "overlap": overlap})
    job = job_file(workers=3, servers=2, algorithm=method, epochs=40.0)
    outcome = Simulation(job, problem, compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    (text,) = outcome.store.texts("quarantine")
    assert "replica's own" in text
    assert sum(refused(outcome).values()) == 0
    assert np.abs(outcome.weights).max() < 100.0


@pytest.mark.long
def test_a_quarantined_worker_comes_back_when_it_is_asked_for() -> None:
    problem = BadHost(np.nan)
    job = job_file(workers=2, nonfinite_steps_max=5, epochs=400.0)
    simulation = Simulation(job, problem, compute=STEPS)

    def mend() -> None:
        problem.is_mended = True

    simulation.at(3.0, mend)
    simulation.request(3.5, "restart", {"names": ["worker-1"]})
    simulation.request(8.0, "stop", {})
    outcome = simulation.run()
    assert outcome.state == "stopped"
    row = outcome.store.daemons["worker-1"]
    assert (row["incarnation"], row["restarts"], row["error"]) == (2, 1, "")
    assert row["metrics"]["step"] > 50


def test_weights_that_would_become_infinite_end_the_run_once_and_its_shards_are_kept() -> None:
    """By pushes that are sound, and a rate that no job file may have: nobody is quarantined, and no
    server tries again what another one could not do.
    """
    job = job_file(workers=3, servers=2, optimizer=("sgd", {"lr": 1e38}), epochs=40.0)
    outcome = Simulation(job, LeastSquares(), compute=STEPS).run()
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    assert '"w"' in outcome.reason
    assert outcome.store.texts("quarantine") == []
    assert [outcome.store.daemons[name]["restarts"] for name in ("server-0", "server-1")] == [0, 0]
    assert sorted(outcome.store.states) == [0, 1]


# ---------------------------------------------------------------- what a barrier is left without


class Explodes(LeastSquares):
    """Some gradients, (slot, number), are finite and far too large, in `where` of the vector."""

    def __init__(self, *which: tuple[int, int], where: slice = slice(None)) -> None:
        super().__init__()
        self.which = which
        self.where = where

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        if (batch.slot, batch.number) in self.which:
            gradient[self.where] = HUGE
        return loss, gradient


class KilledWhileItHolds(Checker):
    """A server that holds the place of a push that it has refused dies, once, as it says so."""

    def __init__(self) -> None:
        self.killed = 0

    def on_effect(self, process, effect) -> None:
        message = getattr(effect, "message", None)
        if not isinstance(message, Ack) or message.outcome != HELD or self.killed:
            return
        if any(held.reason for held in process.machine.serving.side._held.values()):
            self.killed += 1
            process.timeline.after(0.0, lambda: process.end(-9))


def refused(outcome) -> dict[str, int]:
    """Server -> pushes that it has refused."""
    names = [name for name in outcome.store.daemons if name.startswith("server-")]
    servings = {name: outcome.world.machine(name).serving for name in names}
    refused = {name: serving.parameters.refused for name, serving in sorted(servings.items())}
    return {name: sum(counts.values()) for name, counts in refused.items()}


@pytest.mark.long
@pytest.mark.per_commit(1)
@every_method
@pytest.mark.parametrize("compression", ["none", "topk", "int8"])
def test_a_gradient_that_no_server_would_take_leaves_no_trace(compression, method) -> None:
    """Not by a step of the replica's own, nor in what a compressor keeps for later pushes: what is
    computed from there, or sent of it bit by bit, would be small enough to be taken.
    """
    job = job_file(
        workers=2, servers=2, algorithm=method, compression=(compression, {}),
        optimizer=("sgd", {"lr": 0.05 if method[0] != "local-sgd" else 1.0}), epochs=16.0,
    )  # fmt: skip
    problem = Explodes((1, 1))
    outcome = Simulation(job, problem, compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    rows = [outcome.store.daemons[f"worker-{i}"]["metrics"] for i in (0, 1)]
    assert [row["nonfinite_steps"] for row in rows] == [0, 1]
    assert refused(outcome) == {"server-0": 0, "server-1": 0}
    assert np.allclose(outcome.weights, problem.solution, atol=0.5)


@pytest.mark.long
@must_refuse
@every_barrier
def test_one_whose_pushes_are_all_refused_does_not_hold_up_a_barrier(method) -> None:
    job = job_file(workers=3, servers=2, algorithm=method, epochs=12.0)
    outcome = Simulation(job, BadHost(HUGE), compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    (text,) = outcome.store.texts("quarantine")
    assert (text.split()[0], REFUSED in text) == ("worker-1", True)
    assert np.isfinite(outcome.weights).all()


@pytest.mark.long
@pytest.mark.per_commit(2)
@must_refuse
@pytest.mark.parametrize("method", BARRIERS[:2], ids=["sync", "local-sgd"])
@pytest.mark.parametrize("who", [[1], [0, 1]], ids=["one", "all"])
def test_a_step_goes_on_without_the_pushes_that_were_refused(method, who) -> None:
    problem = Explodes(*((slot, 1) for slot in who))
    rate = 0.1 if method[0] == "sync" else 1.0
    job = job_file(
        workers=2, servers=2, algorithm=method, optimizer=("sgd", {"lr": rate}), epochs=40.0
    )
    outcome = Simulation(job, problem, compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert refused(outcome) == {"server-0": len(who), "server-1": len(who)}
    assert not outcome.store.texts("quarantine")
    assert np.allclose(outcome.weights, problem.solution, atol=0.1)


@pytest.mark.long
@must_refuse
def test_a_step_goes_on_where_only_one_of_two_servers_has_refused_a_push() -> None:
    problem = Explodes((1, 1), where=slice(6, None))
    job = job_file(workers=2, servers=2, algorithm=("sync", {}), epochs=20.0)
    outcome = Simulation(job, problem, compute=STEPS).run(600.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])
    assert refused(outcome) == {"server-0": 0, "server-1": 1}
    assert np.allclose(outcome.weights, problem.solution, atol=0.1)


@pytest.mark.long
@must_refuse
def test_a_server_that_dies_while_a_step_waits_refuses_the_push_again() -> None:
    problem, killer = Explodes((1, 1)), KilledWhileItHolds()
    job = job_file(workers=2, algorithm=("sync", {}), epochs=20.0)
    slow = ComputeOptions(step_s=0.02, slow={0: 5.0})
    outcome = Simulation(job, problem, compute=slow, checkers=(killer,)).run(600.0)
    assert (outcome.state, outcome.left_behind, killer.killed) == ("finished", [], 1)
    assert refused(outcome) == {"server-0": 1}
    assert np.allclose(outcome.weights, problem.solution, atol=0.1)


class HugeNowAndThen(Ledger):
    """An account in which every fifth gradient of slot 1 is far too large on the last shard."""

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        loss, gradient = super().gradient(w, batch)
        if batch.slot == 1 and batch.number % 5 == 4:
            gradient[-self.cells :] *= np.float32(HUGE)
        return loss, gradient


@pytest.mark.long
@pytest.mark.per_commit(1)
@must_refuse
@pytest.mark.parametrize("block", range(3))
def test_every_sound_gradient_counts_exactly_once_beside_refused_ones(block: int) -> None:
    """The cells of one step add up to 1, whoever was left out of it."""
    left_out = 0
    for seed in range(2 * block, 2 * block + 2):
        problem = HugeNowAndThen(shards=2)
        job = job_file(
            workers=3, servers=2, algorithm=("sync", {}), optimizer=("sgd", {"lr": 1.0}),
            batch_size=4, epochs=4.0, seed=seed,
        )  # fmt: skip
        outcome = Simulation(
            job, problem, seed,
            network=NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.03, duplicate=0.05)),
            compute=STEPS,
            faults=Faults(server_kills=2, kills=1, from_s=0.3, heal_at_s=3.0),
            checkers=ledger_checkers(
                problem, 4, once=False, averages=True, shares=True, heal_at_s=3.0
            ),
        ).run(600.0)  # fmt: skip
        assert outcome.state == "finished", seed
        numbers = refused(outcome)
        assert numbers["server-0"] == 0
        left_out += numbers["server-1"]
    assert left_out > 0
