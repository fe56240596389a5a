"""Methods that bound or use staleness, in whole runs with deaths and joins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import Watcher, job_file, rows_in_order

from dlctl.roles.protocol.effects import Compute
from dlctl.sim.checkers import (
    BufferedChecker,
    Checker,
    FetchesChecker,
    LeasesChecker,
    LivenessChecker,
    NothingLeft,
    SamplesChecker,
    TermsChecker,
)
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.world import World
from dlctl.wire.messages import Ack, PortionDone

TIMEOUTS = {"silent_s": 6.0, "resend_s": 0.3}
HEAL_AT_S = 5.0


class ClocksApart(Checker):
    """No replica computes more clocks ahead of another one than it may be."""

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.most = 0
        self._at_work: dict[int, Any] = {}

    def on_effect(self, process: Any, effect: Any) -> None:
        if not isinstance(effect, Compute):
            return
        machine = process.machine
        side = machine.training.side
        self._at_work[side.slot] = process
        clocks = [
            other.machine.training.side.clock
            for other in self._at_work.values()
            if other.alive and other.machine.training.side.is_counted
        ]
        apart = side.clock - min(clocks, default=side.clock)
        self.most = max(self.most, apart)
        if apart > self.staleness:
            raise self.broken(f"{process} computes at {side.clock}; others are at {clocks}")


def ssp_run(seed: int, staleness: int, **more: int) -> tuple[Outcome, ClocksApart]:
    rng = np.random.default_rng(seed)
    loss, duplicate, reorder = (float(p) for p in rng.uniform(0, 0.1, 3))
    link = SimLink(
        latency_s=float(rng.uniform(0.0002, 0.02)), jitter_s=0.005,
        loss=loss, duplicate=duplicate, reorder=reorder,
    )  # fmt: skip
    apart = ClocksApart(staleness)
    problem, epochs = LeastSquares(samples=192), 3
    job = job_file(
        3, 2, algorithm=("ssp", {"staleness": staleness, **more}), batch_size=4, portion_batches=2,
        seed=seed, epochs=float(epochs), restarts_max=20, timeouts=TIMEOUTS, checkpoint_s=0.6,
    )  # fmt: skip
    faults = Faults(
        kills=2, server_kills=int(rng.integers(2)), coordinator_kills=int(rng.integers(2)),
        resets=1, freezes=1, freeze_s=1.0, from_s=0.5, heal_at_s=HEAL_AT_S,
    )  # fmt: skip
    simulation = Simulation(
        job, problem, seed, network=NetworkOptions(link=link), faults=faults,
        compute=ComputeOptions(step_s=0.1, spread=0.6, build_s=0.1, slow={1: 2.0}),
        checkers=(
            TermsChecker(), SamplesChecker(problem.samples, epochs, once=False),
            LeasesChecker(problem.samples, epochs), FetchesChecker(), LivenessChecker(HEAL_AT_S),
            NothingLeft(), apart,
        ),
    )  # fmt: skip
    if seed % 3 == 0:
        simulation.request(2.0, "scale", {"workers": 4})
    return simulation.run(100.0), apart


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.long)])
def test_clocks_are_never_further_apart_than_they_may_be_whoever_dies_and_joins(staleness, seeds):
    most = 0
    for seed in seeds:
        outcome, apart = ssp_run(seed, staleness, fetch_every_clocks=1 + seed % 3)
        assert outcome.state == "finished", (seed, outcome.reason)
        most = max(most, apart.most)
    assert most == staleness, "it is used, too"


@pytest.mark.oracle("ssp", "batches of both workers, twice the rate (staleness 0)")
@pytest.mark.parametrize("victim", [None, "server-1", "coordinator"])
def test_without_staleness_it_is_the_sum_of_all_updates_of_a_clock(victim, agree):
    """With as many samples in a clock, twice as large a rate makes of the mean of two a sum."""
    problem = LeastSquares(samples=256)
    job = job_file(
        2, 2, algorithm=("ssp", {"staleness": 0, "inner_lr": 0.05}), batch_size=8, epochs=3.0,
        portion_batches=1, optimizer=("sgd", {"lr": 1.0}),
    )  # fmt: skip
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.1, spread=0.0))
    if victim:
        simulation.at(2.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    w = problem.initial()
    for number, rows in enumerate(rows_in_order(job_file(batch_size=16), 256, epochs=3)):
        w = w - np.float32(0.1) * problem.gradient(w, Batch(rows, 0, 1, number))[1]
    agree(outcome.weights, w, atol=2e-6)


def bounded(
    algorithm: str,
    options: dict[str, Any],
    seed: int = 0,
    *checkers: Checker,
    reads_w: bool = True,
    **more: Any,
) -> Simulation:
    """A run with a slow worker, in which a worker, a server and the coordinator die."""
    problem, epochs = LeastSquares(samples=192), 3
    job = job_file(
        3, 2, algorithm=(algorithm, options), batch_size=4, portion_batches=2, seed=seed,
        epochs=float(epochs), restarts_max=20, timeouts=TIMEOUTS, checkpoint_s=0.6, **more,
    )  # fmt: skip
    link = SimLink(latency_s=0.002, jitter_s=0.005, loss=0.05, duplicate=0.05, reorder=0.05)
    faults = Faults(
        kills=2, server_kills=1, coordinator_kills=seed % 2, resets=1, from_s=0.5,
        heal_at_s=HEAL_AT_S,
    )  # fmt: skip
    common = (
        TermsChecker(), SamplesChecker(problem.samples, epochs, once=False),
        LeasesChecker(problem.samples, epochs), LivenessChecker(HEAL_AT_S), NothingLeft(),
        *([FetchesChecker()] if reads_w else []),
    )  # fmt: skip
    return Simulation(
        job, problem, seed, network=NetworkOptions(link=link), faults=faults,
        compute=ComputeOptions(step_s=0.1, spread=0.6, build_s=0.1, slow={1: 2.0}),
        checkers=(*common, *checkers),
    )  # fmt: skip


def learned(simulation: Simulation) -> Outcome:
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason
    problem = LeastSquares(samples=192)
    assert (
        problem.evaluate(outcome.weights)["loss"]
        < 0.5 * problem.evaluate(0 * outcome.weights)["loss"]
    )
    return outcome


@pytest.mark.parametrize(("seed", "durability"), [(0, "process"), (1, "disk")])
def test_softsync_loses_no_push_that_is_only_buffered(seed, durability):
    learned(bounded("softsync", {"n": 1}, seed, BufferedChecker(), durability=durability))


@pytest.mark.long
@pytest.mark.oracle("softsync", "downpour, where n is the number of learners")
def test_softsync_of_as_many_updates_as_learners_at_one_rate_is_downpour(agree):
    def run(algorithm: str, **options: Any) -> Outcome:
        job = job_file(
            3, 2, algorithm=(algorithm, options), inner=("none", {}), batch_size=4, epochs=3.0
        )
        return Simulation(job, LeastSquares(samples=192), 3).run(100.0)

    softsync = run("softsync", n=3, modulated=False)
    downpour = run("downpour", overlap=False)
    agree(softsync.weights, downpour.weights)
    assert run("softsync", n=3).weights.tolist() != downpour.weights.tolist()


class ComputesWithItsCopy(Checker):
    """What a worker computes with is, to the last bit, the copy that corrects its gradient."""

    def __init__(self) -> None:
        self.compared = 0

    def at_start(self, world: World) -> None:
        self._world = world

    def on_effect(self, process: Any, effect: Any) -> None:
        if not isinstance(effect, Compute):
            return
        training = process.machine.training
        slot = training.side.slot
        for channel in training.links.channels:
            serving = getattr(self._world.machine(f"server-{channel.shard}"), "serving", None)
            shown = serving and serving.initialised and serving.side.shown(slot)
            if not shown or not serving.parameters.dedup.is_current(
                slot, training.links.identity.term
            ):
                continue
            self.compared += 1
            model = training.side.parameters[channel.lo : channel.hi]
            if not np.array_equal(model, shown[1]) or channel.basis.version != shown[0]:
                raise self.broken(f"{process} computes with what server-{channel.shard} has not")


@pytest.mark.parametrize(("seed", "durability"), [(0, "process"), (1, "disk")])
def test_a_gradient_is_corrected_by_what_it_was_computed_with_whoever_dies(seed, durability):
    checker = ComputesWithItsCopy()
    options = {"variance": ("constant", "adaptive")[seed]}
    learned(bounded("dc-asgd", options, seed, checker, reads_w=False, durability=durability))
    assert checker.compared > 100


@pytest.mark.oracle("ringmaster", "downpour, where no gradient is too old")
def test_ringmaster_uses_no_gradient_that_is_too_old_and_one_that_waits_for_none_is_downpour(agree):
    acks = Watcher(Ack)
    learned(bounded("ringmaster", {"delay_max": 2}, 0, acks))
    told = {(ack.outcome, ack.staleness >= 2) for ack in acks.messages() if ack.staleness}
    assert told == {("applied", False), ("late", True)}

    def run(algorithm: str, **options: Any) -> Outcome:
        job = job_file(
            3, 2, algorithm=(algorithm, options), inner=("none", {}), batch_size=4, epochs=3.0
        )
        return Simulation(job, LeastSquares(samples=192), 3).run(100.0)

    ringmaster = run("ringmaster", delay_max=100)
    agree(ringmaster.weights, run("downpour", overlap=False).weights)


@pytest.mark.parametrize(("seed", "durability"), [(0, "process"), (1, "disk")])
def test_ringleader_loses_no_gradient_that_is_in_a_table(seed, durability):
    learned(bounded("ringleader", {}, seed, BufferedChecker(), durability=durability))


def cut_run(fraction: float, *, victims: tuple[str, ...] = ()) -> tuple[Outcome, list[Any]]:
    """Four workers, one of which takes eight times as long; and the portions that were done."""
    done = Watcher(PortionDone)
    job = job_file(
        4, 2, algorithm=("epoch-cut", {"fraction": fraction, "inner_lr": 0.0}), batch_size=4,
        portion_batches=1, epochs=4.0, timeouts=TIMEOUTS,
    )  # fmt: skip
    simulation = Simulation(
        job, LeastSquares(samples=256), 1,
        compute=ComputeOptions(step_s=0.1, spread=0.1, slow={3: 8.0}),
        checkers=(TermsChecker(), LivenessChecker(HEAL_AT_S), NothingLeft(), done),
    )  # fmt: skip
    for number, victim in enumerate(victims):
        simulation.at(2.0 + number, lambda victim=victim: simulation.world.kill(victim))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason
    return outcome, done.messages()


@pytest.mark.oracle("epoch-cut", "downpour, one worker")
def test_with_one_worker_nothing_is_cut_and_it_is_downpour(agree):
    def run(algorithm: str) -> Outcome:
        job = job_file(1, 2, algorithm=(algorithm, {}), optimizer=("adam", {"lr": 0.05}))
        return Simulation(job, LeastSquares(samples=192), 3).run(100.0)

    agree(run("epoch-cut").weights, run("downpour").weights)


@pytest.mark.long
def test_an_epoch_that_is_cut_does_not_wait_for_the_slowest():
    whole, _ = cut_run(1.0)
    cut, done = cut_run(0.75)
    assert cut.seconds < 0.5 * whole.seconds
    of_epochs = [{d.portion for d in done if d.data_epoch == epoch} for epoch in range(4)]
    assert [48 <= len(portions) < 64 for portions in of_epochs] == [True] * 4
    problem = LeastSquares(samples=256)
    assert problem.evaluate(cut.weights)["loss"] < 0.01


@pytest.mark.per_commit(2)
def test_a_worker_that_has_its_share_pushes_what_it_has_accrued():
    """Else its share is never done, and no epoch ends."""
    problem = LeastSquares(samples=256)
    job = job_file(
        4, 2, algorithm=("epoch-cut", {"push_every_steps": 3}), portion_batches=4, batch_size=4,
        epochs=4.0,
    )  # fmt: skip
    assert Simulation(job, problem).run(until_s=60.0).state == "finished"


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("victim", ["worker-3", "worker-0", "server-1", "coordinator"])
def test_epochs_are_cut_whoever_dies(victim):
    _, done = cut_run(0.75, victims=(victim,))
    assert len({(d.data_epoch, d.portion) for d in done}) >= 4 * 48
