"""Whole runs of target-batch: who comes, leaves or dies changes no step but for who computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from scenarios import ACCOUNTS, wants_cuts
from simulated import ACCOUNT, SaveAtCut, Watcher, job_file

from benchmarks.target_batch import CASES, RATES, Case, linked, of_links, simulated_s
from dlctl.job.config import Host
from dlctl.roles.coordinator.persistence import corrected
from dlctl.roles.coordinator.supervision.recutting import CLOSED_S_MAX
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.rows import rows_in
from dlctl.sim.checkers import (
    Checker,
    GlobalBook,
    LivenessChecker,
    NothingLeft,
    RecutChecker,
    SamplesChecker,
    TermsChecker,
)
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Batch, LeastSquares, TurnedLedger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import Array

SAMPLES, EPOCHS, TARGET, BATCH, LR = 256, 12, 96, 4, 0.1


class ByProcess(LeastSquares):
    """Keeps the rows of every batch, by the process that has computed it. With much noise the
    parameters stay in motion: two different ways do not end at one solution.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(noise=0.5, **more)
        self.batches: defaultdict[tuple[int, int], list[Array]] = defaultdict(list)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        self.batches[batch.slot, batch.term].append(batch.rows)
        return super().gradient(w, batch)


class OneStep(NamedTuple):
    clock: int
    rows: Array
    members: int


class Run:
    def __init__(
        self, workers: int = 3, compute: ComputeOptions | None = None, **options: Any
    ) -> None:
        self.problem = ByProcess(samples=SAMPLES)
        self.watcher = Watcher(m.Push, m.Decided)
        method = {"target_samples": TARGET, **options}
        job = job_file(
            workers, 2, algorithm=("target-batch", method), optimizer=("sgd", {"lr": LR}),
            batch_size=BATCH, portion_batches=2, epochs=float(EPOCHS), restarts_max=20,
            workers_max=8,
        )  # fmt: skip
        self.simulation = Simulation(
            replace(job, job=replace(job.job, task="none")), self.problem, 1,
            compute=compute or ComputeOptions(step_s=0.1, spread=0.3, slow={2: 3.0}),
            checkers=(
                TermsChecker(), SamplesChecker(SAMPLES, EPOCHS, once=False), LivenessChecker(0.0),
                NothingLeft(), self.watcher,
            ),
        )  # fmt: skip

    def finished(self) -> Outcome:
        outcome = self.simulation.run(400.0)
        assert outcome.state == "finished", outcome.reason
        return outcome

    def steps(self) -> list[OneStep]:
        """The steps that the shards have made, by what was decided and pushed."""
        decided: dict[int, list[list[int]]] = {}
        rows: dict[tuple[int, int, int], Array] = {}
        left = {process: list(batches) for process, batches in self.problem.batches.items()}
        seen = set()
        for message in self.watcher.messages():
            if isinstance(message, m.Decided):
                decided[message.clock] = rows_in(message.used, 2)
                continue
            process = message.slot, message.term
            if message.table or not message.samples or (*process, message.clock) in seen:
                continue
            seen.add((*process, message.clock))
            found: list[Array] = []
            while sum(map(len, found)) < message.samples:
                found.append(left[process].pop(0))
            rows[(*process, message.clock)] = np.concatenate(found)
        made = []
        for clock, processes in sorted(decided.items()):
            used = [rows[s, t, clock] for s, t in processes if (s, t, clock) in rows]
            if used:
                made.append(OneStep(clock, np.concatenate(used), len(processes)))
        return made

    def in_one_process(self) -> Array:
        """Large-batch SGD over the same samples."""
        w = self.problem.initial()
        for step in self.steps():
            w -= (
                np.float32(LR)
                * LeastSquares.gradient(self.problem, w, Batch(step.rows, 0, 0, 0))[1]
            )
        return w


def churn(run: Run) -> None:
    """Workers join, leave and die, one of them between its push and the step."""
    simulation, world = run.simulation, run.simulation.world
    simulation.request(3.0, "scale", {"workers": 5})
    simulation.at(5.05, lambda: world.kill("worker-1"))
    simulation.at(8.0, lambda: world.kill("worker-3"))
    simulation.request(10.0, "scale", {"workers": 2})
    simulation.at(12.0, lambda: world.kill("worker-0"))


@pytest.mark.oracle("target-batch", "one process over the same samples, while workers come and go")
@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_the_steps_are_those_of_one_process_whoever_takes_part(comes_and_goes, agree) -> None:
    run = Run()
    if comes_and_goes:
        churn(run)
    outcome = run.finished()
    agree(outcome.weights, run.in_one_process(), rtol=1e-6, atol=1e-6)
    assert run.simulation.world.store.run["samples"] >= SAMPLES * EPOCHS - TARGET * 2


@pytest.mark.long
def test_a_step_has_the_target_and_at_most_a_batch_of_each_more() -> None:
    run = Run()
    run.finished()
    *steps, _ = run.steps()  # The data ends in the last one.
    assert len(steps) > 20
    for step in steps:
        assert TARGET <= len(step.rows) <= TARGET + BATCH * step.members, step.clock


@pytest.mark.long
def test_a_silent_worker_holds_a_step_no_longer_than_the_deadline() -> None:
    run = Run(deadline_s=2.0)
    world = run.simulation.world
    run.simulation.at(6.0, lambda: world.freeze("worker-1"))
    run.simulation.at(14.0, lambda: world.thaw("worker-1"))
    outcome = run.finished()
    times = [t for t, *_, message in run.watcher.sent if isinstance(message, m.Decided)]
    assert max(np.diff(times)) < 6.0
    agree_to = run.in_one_process()
    np.testing.assert_allclose(outcome.weights, agree_to, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["worker-0", "coordinator", "server-1"])
def test_a_death_stops_nobody(name: str) -> None:
    run = Run()
    run.simulation.at(4.03, lambda: run.simulation.world.kill(name))
    outcome = run.finished()
    np.testing.assert_allclose(outcome.weights, run.in_one_process(), rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_the_target_changes_while_the_run_goes_on() -> None:
    run = Run()
    run.simulation.request(4.0, "set", {"names": [], "settings": {"target_samples": "24"}})
    run.finished()
    sizes = [len(step.rows) for step in run.steps()]
    assert sizes[0] >= TARGET
    assert sizes[-2] < TARGET / 2


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 2])
def test_a_target_that_nobody_reaches_ends_with_the_run_in_one_step_of_what_there_is(
    kills: int,
) -> None:
    """Also by the only worker that is left. Nobody waits for a full batch."""
    problem, seconds = LeastSquares(samples=SAMPLES), 12.0
    job = job_file(
        3, 2, algorithm=("target-batch", {"target_samples": 10**6}), optimizer=("sgd", {"lr": LR}),
        batch_size=BATCH, portion_batches=2, seconds=seconds, restarts_max=0,
    )  # fmt: skip
    simulation = Simulation(
        job, problem, 1, compute=ComputeOptions(step_s=0.1),
        checkers=(TermsChecker(), LivenessChecker(0.0), NothingLeft()),
    )  # fmt: skip
    for slot in range(1, 1 + kills):
        simulation.at(4.0 + slot, partial(simulation.world.kill, f"worker-{slot}"))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason
    assert outcome.seconds < seconds + 5.0
    assert not outcome.store.texts("late")
    shards = [outcome.world.machine(f"server-{shard}").serving.shard for shard in range(2)]
    assert [shard.version for shard in shards] == [1, 1]
    assert shards[0].samples == shards[1].samples > 0


def test_replicas_say_how_long_a_step_takes() -> None:
    run = Run(compute=ComputeOptions(step_s=0.1, spread=0.0))
    found: list[float] = []
    world = run.simulation.world

    def look() -> None:
        found.extend(
            machine.training.side.figures()["update_s"]
            for n in range(3)
            if (machine := world.machine(f"worker-{n}"))
        )

    run.simulation.at(6.0, look)
    run.finished()
    expected_s = TARGET / (3 * BATCH / 0.1)
    np.testing.assert_allclose(found, [expected_s] * 3, rtol=0.1)


# ---------------------------------------------------------------- links of unequal hosts


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_parts_by_bandwidth_against_equal_ones(case: Case) -> None:
    """Hosts with links of 10, 10, 1 and 1. One that only serves has a part like its bandwidth;
    where a worker is on each, no parts are faster than two thirds of equal ones, or than these.
    """
    least = {"workers elsewhere": 4 / 22, "beside, shared links": 2 / 3}.get(case.what, 1.0)
    ratio = simulated_s(case.layout, case) / simulated_s("equal", case)
    assert case.asked is not None
    assert least - 0.02 <= ratio <= case.asked


@pytest.mark.long
def test_parts_follow_the_bandwidths_that_pushes_show() -> None:
    """No bandwidth is stated: hosts with links of 10, 10, 1 and 1 serve equal parts at first."""
    job = of_links("bandwidth", RATES, beside=False)
    hosts = tuple(replace(host, bandwidth="") for host in job.hosts)
    job = replace(
        job, hosts=hosts, servers=replace(job.servers, recut_s=8.0),
        job=replace(job.job, stop=replace(job.job.stop, steps=4 * 60)),
        optimizer=replace(job.optimizer, options={"lr": 1e-6}),
    )  # fmt: skip
    watcher = Watcher(m.Decided, m.NewBounds)
    outcome = linked(job, RATES, checkers=(watcher, NothingLeft())).run(1e5)
    assert outcome.state == "finished", outcome.reason
    new = [message for message in watcher.messages() if isinstance(message, m.NewBounds)]
    assert {message.number for message in new} == {new[0].number}, "one cut, and it stays"
    sizes = np.diff(new[0].bounds) / new[0].bounds[-1]
    np.testing.assert_allclose(sizes, [10 / 22, 10 / 22, 1 / 22, 1 / 22], atol=0.03)
    decided: dict[int, float] = {}
    for at, *_, message in watcher.sent:
        if isinstance(message, m.Decided):
            decided.setdefault(message.clock, at)
    rounds_s = [decided[clock] - decided[clock - 1] for clock in sorted(decided)[1:]]
    assert np.median(rounds_s[-10:]) <= 0.3 * np.median(rounds_s[:10])


def test_steps_are_those_of_an_uncut_run_to_the_last_bit() -> None:
    """With the state of the optimiser, and shards without any element."""
    weights = {}
    for recut_s in (0.0, 0.05):
        job = job_file(
            2, 3, algorithm=("target-batch", {"target_samples": 1}), batch_size=BATCH,
            optimizer=("adam", {"lr": 0.02}), epochs=3.0, portion_batches=2,
        )  # fmt: skip
        job = replace(
            job, servers=replace(job.servers, layout="bandwidth", recut_s=recut_s),
            data=replace(job.data, lease_ahead_s=0.0),
        )  # fmt: skip
        watcher = Watcher(m.NewBounds)
        simulation = Simulation(
            job, LeastSquares(samples=64, size=1200), 1, compute=ComputeOptions(spread=0.0),
            checkers=(watcher, NothingLeft()),
        )  # fmt: skip
        wants_cuts(simulation.world, np.random.default_rng(0), 3)
        outcome = simulation.run()
        assert outcome.state == "finished", outcome.reason
        assert (len(watcher.messages()) > 4) is (recut_s > 0)
        weights[recut_s] = outcome.weights
    np.testing.assert_array_equal(*weights.values())


def cut_often(*checkers: Checker) -> Simulation:
    """Three servers that are cut anew as often as possible, and an account of all pushes."""
    job = job_file(
        2, 3, algorithm=("target-batch", {"target_samples": 8}), batch_size=BATCH,
        optimizer=ACCOUNT, epochs=3.0, portion_batches=2,
    )  # fmt: skip
    job = replace(job, servers=replace(job.servers, layout="bandwidth", recut_s=0.05))
    problem = TurnedLedger(shards=ACCOUNTS, cells=200)
    book = GlobalBook(problem)
    every = (book, RecutChecker(book), NothingLeft(), *checkers)
    simulation = Simulation(job, problem, 1, checkers=every)
    wants_cuts(simulation.world, np.random.default_rng(0), 3)
    return simulation


def test_nothing_is_cut_where_a_checkpoint_takes_longer_than_servers_may_pause() -> None:
    watcher = Watcher(m.Decided)
    simulation = cut_often(watcher)
    honest = simulation.world.start

    def start(*of: Any, **more: Any) -> Any:
        process = honest(*of, **more)
        process.machine.checkpointing.last_s = CLOSED_S_MAX  # type: ignore[attr-defined]
        return process

    simulation.world.start = start  # type: ignore[method-assign]
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    assert {decided.cut for decided in watcher.messages()} == {0}


class AtCut(Checker):
    """Does something once, as soon as the record of a cut has been made."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do, self._is_done = do, False

    def on_effect(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send(message=m.Recut(is_made=True)) if not self._is_done:
                self._is_done = True
                process.timeline.after(0.0, self._do)


def test_a_run_that_is_stopped_while_servers_move_saves_what_they_get() -> None:
    simulation = cut_often(
        AtCut(lambda: simulation.request(0.0, "stop", {"grace_s": 0.0, "checkpoint": True}))
    )
    outcome = simulation.run()
    assert outcome.state == "stopped", outcome.reason
    saved = max(outcome.store.manifests.values(), key=lambda manifest: manifest["number"])
    assert saved["number"] == 2, "behind that of the cut"
    assert saved["step"] == outcome.store.run["step"]


@pytest.mark.long
def test_a_recovery_behind_the_record_of_a_cut_does_not_go_on_with_the_old_parts() -> None:
    """Power is lost; `dlctl recover` finds the old parts, and corrects the record by that."""

    def lose_power() -> None:
        for process in [each for each in world.processes if each.alive]:
            process.end(-9)
        world.recover(0.5)

    def past() -> Past:
        found, served = honest(), [f"server-{index}" for index in range(3)]
        return replace(
            found, memory={**found.memory, **corrected(found.memory, {"served": served})}
        )

    simulation = cut_often(AtCut(lose_power))
    world = simulation.world
    honest, world.past = world.past, past  # type: ignore[method-assign]
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason


def test_a_checkpoint_that_is_asked_for_while_servers_move_has_one_cut() -> None:
    """It is saved when all have their parts of that, and is not mixed with the parts of before."""
    simulation = cut_often()
    asked = SaveAtCut(simulation)
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    answers = [client.reply for client in asked.clients]
    assert len(answers) > 1
    assert all(answer and answer.done for answer in answers)
    assert {answer.error for answer in answers} == {""}


def test_a_run_that_is_started_again_is_cut_by_the_bandwidths_that_its_job_has_then() -> None:
    """With the state of the optimiser: the steps are the same to the last bit."""
    weights, bounds = {}, {}
    for layout in ("equal", "bandwidth"):
        store = Store()
        for epochs, chosen in ((1.0, "equal"), (3.0, layout)):
            hosts = [
                Host(ssh=f"h{n}", servers=1, workers=0, bandwidth=f"{rate}MB/s")
                for n, rate in enumerate((10, 1))
            ]
            job = job_file(
                2, 2, algorithm=("target-batch", {"target_samples": 1}), batch_size=BATCH,
                optimizer=("adam", {"lr": 0.02}), epochs=epochs, portion_batches=2,
                hosts=(*hosts, Host(ssh="w", servers=0, bandwidth="100MB/s")),
            )  # fmt: skip
            job = replace(
                job, servers=replace(job.servers, layout=chosen),
                data=replace(job.data, lease_ahead_s=0.0),
            )  # fmt: skip
            problem = LeastSquares(samples=64, size=1100)
            outcome = Simulation(
                job, problem, 1, store=store, compute=ComputeOptions(spread=0.0)
            ).run()
            assert outcome.state == "finished", outcome.reason
        weights[layout] = outcome.weights
        serving = outcome.world.machine("server-0").serving
        bounds[layout] = serving.assigned.bounds
    assert bounds == {"equal": (0, 550, 1100), "bandwidth": (0, 1100, 1100)}
    np.testing.assert_array_equal(weights["equal"], weights["bandwidth"])
