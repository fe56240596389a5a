"""How runs end and go on: nothing that was trained is left out of the last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from simulated import Watcher, job_file

from dlctl import registry
from dlctl.records.manifest import FAILURE
from dlctl.roles.coordinator.shutdown import SAVE_PAUSE_S, SAVES_MAX
from dlctl.roles.protocol.context import COORDINATOR, EXIT_POISONED
from dlctl.roles.protocol.effects import LoadArrays
from dlctl.roles.protocol.files import CheckFile, FileSealed, StillReading
from dlctl.roles.server.server import Server
from dlctl.sim import arrays, drivers
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, WithBuffers, layout_of
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire import messages as m
from dlctl.wire.machine import Received, Send, Started
from dlctl.wire.messages import Register

pytestmark = pytest.mark.long

STOP = {"checkpoint": True, "grace_s": 30.0}


def saved_weights(outcome: Outcome) -> np.ndarray:
    return outcome.store.files[outcome.store.run["checkpoint"]["path"]]["shard-0.safetensors"]["w"]


def test_the_last_checkpoint_is_none_that_was_under_way_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A periodic one begins a second before the stop and takes three; it has not the last steps."""
    monkeypatch.setattr(drivers, "SAVE_S", 3.0)
    job = job_file(workers=2, epochs=1000.0, checkpoint_s=5.0)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=ComputeOptions(step_s=0.05))
    simulation.request(6.0, "stop", STOP)
    outcome = simulation.run()
    assert outcome.store.run["checkpoint"]["step"] == outcome.store.run["step"]
    assert np.array_equal(saved_weights(outcome), outcome.weights)


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(("reads", "without"), [(True, []), (False, ["worker-0", "worker-1"])])
def test_the_last_checkpoint_waits_for_files_that_a_slow_disk_reads_and_not_for_one_that_hangs(
    reads: bool, without: list[str]
) -> None:
    """Each worker's file is read for 600 s, one after the other."""
    job = job_file(workers=2, epochs=2.0, compression=("topk", {"density": 0.1}))
    simulation = Simulation(job, LeastSquares(), compute=ComputeOptions(step_s=0.05))
    free_at = 0.0

    def look(effect: CheckFile) -> None:
        nonlocal free_at
        coordinator, now = simulation.world.coordinator, simulation.world.timeline.now
        begins_at, free_at = max(now, free_at), max(now, free_at) + 600.0
        for second in range(0, 600, 100) if reads else ():
            coordinator.post(StillReading(), begins_at + second - now)
        coordinator.post(FileSealed(effect.file, ""), free_at - now)

    simulation.at(0.5, lambda: simulation.world.coordinator.perform(CheckFile, look))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert [row["without"] for row in outcome.store.checkpoints.values()] == [without]
    assert (outcome.seconds > 1200.0) == reads


@pytest.mark.parametrize("algorithm", ["sync", "local-sgd"])
def test_who_was_cut_off_when_it_was_to_drain_does_so_when_it_is_heard_again(
    algorithm: str,
) -> None:
    """It was given up. But the others wait for it at a barrier, and can save only behind that."""
    drained = Watcher(m.Drained)
    job = job_file(
        workers=3, servers=2, epochs=1000.0, portion_batches=8, checkpoint_s=0.3,
        algorithm=(algorithm, {}),
    )  # fmt: skip
    compute = ComputeOptions(step_s=0.05)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=compute, checkers=(drained,))
    network = simulation.world.network
    simulation.at(0.7, lambda: simulation.world.kill("worker-2"))  # Its portions begin in between.
    simulation.at(3.0, lambda: network.cut(COORDINATOR, "worker-1"))
    simulation.at(7.0, lambda: network.heal(COORDINATOR, "worker-1"))
    simulation.request(4.0, "stop", STOP | {"grace_s": 0.0})
    assert simulation.run().state == "stopped"
    assert drained.messages("worker-1")


def test_who_comes_to_work_while_the_run_drains_is_told_to_drain() -> None:
    """Its process was on its way when the others were told; there is no data for it any more."""
    drained = Watcher(m.Drained)
    job = job_file(workers=2, epochs=1000.0, portion_batches=8, algorithm=("sync", {}))
    compute = ComputeOptions(step_s=0.05)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=compute, checkers=(drained,))
    simulation.at(1.0, lambda: simulation.world.kill("worker-1"))
    simulation.request(1.1, "stop", STOP)
    assert simulation.run().state == "stopped"
    assert len(drained.messages("worker-1")) == 1


def test_a_last_checkpoint_that_took_long_to_fail_is_tried_again() -> None:
    job = job_file(workers=2, epochs=1000.0)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=ComputeOptions(step_s=0.05))
    disk = simulation.world.disk
    disk.save_s = 30.0
    simulation.request(2.0, "stop", STOP)
    simulation.at(disk.save_s + 1.0, lambda: setattr(disk, "full", 1))
    simulation.at(disk.save_s + 3.0, lambda: setattr(disk, "full", 0))
    outcome = simulation.run()
    assert outcome.state == "stopped"
    assert [bool(row["error"]) for row in outcome.store.checkpoints.values()] == [True, False]
    assert np.array_equal(saved_weights(outcome), outcome.weights)


def test_a_last_checkpoint_that_nobody_answers_is_tried_twice() -> None:
    """`dlctl stop` waits for ten minutes."""
    simulation = Simulation(job_file(workers=2, epochs=1000.0), LeastSquares(samples=1024))
    simulation.world.disk.save_s = 1000.0
    simulation.request(2.0, "stop", STOP)
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert "its last checkpoint failed" in outcome.reason
    assert len(outcome.store.checkpoints) == 2


def test_a_coordinator_that_stood_still_between_last_checkpoints_has_all_of_its_time_to_try():
    frozen_s = 0.9 * SAVES_MAX * SAVE_PAUSE_S
    job = job_file(workers=2, epochs=1000.0)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=ComputeOptions(step_s=0.05))
    world = simulation.world
    world.disk.save_s = 1.0
    simulation.request(2.0, "stop", STOP)
    for at_s in (2.9, 3.5 + frozen_s + 0.02):  # While it saves.
        simulation.at(at_s, lambda: world.kill("server-0"))
    simulation.at(3.5, lambda: world.freeze("coordinator"))
    simulation.at(3.5 + frozen_s, lambda: world.thaw("coordinator"))
    outcome = simulation.run()
    assert outcome.state == "stopped", outcome.reason
    assert [bool(row["error"]) for row in outcome.store.checkpoints.values()] == [True, True, False]
    assert np.array_equal(saved_weights(outcome), outcome.weights)


@pytest.mark.long
def test_coordinators_that_die_sooner_than_a_checkpoint_is_due_do_not_put_it_off_for_ever() -> None:
    job = job_file(workers=2, epochs=1000.0, checkpoint_s=20.0)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=ComputeOptions(step_s=0.05))
    for at_s in range(12, 96, 12):
        simulation.at(at_s, lambda: simulation.world.kill("coordinator"))
    simulation.request(100.0, "stop", STOP)
    outcome = simulation.run()
    in_time = [row for row in outcome.store.checkpoints.values() if not row["error"]]
    assert 4 <= len(in_time) <= 6


def test_a_stop_before_the_first_portion_is_done_saves_what_the_drain_completes() -> None:
    job = job_file(workers=2, portion_batches=8, epochs=100.0)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=ComputeOptions(step_s=1.0))
    simulation.request(5.0, "stop", STOP)
    outcome = simulation.run()
    assert outcome.store.run["step"] == 16
    assert np.array_equal(saved_weights(outcome), outcome.weights)


@pytest.mark.parametrize(("samples", "stop"), [(64, {"steps": 100}), (260, {"steps": 100})])
def test_a_limit_in_steps_counts_the_batches_that_there_are(
    samples: int, stop: dict[str, int]
) -> None:
    job = job_file(batch_size=32, portion_batches=8, **stop)
    outcome = Simulation(job, LeastSquares(samples=samples)).run()
    assert 100 <= outcome.store.run["step"] < 100 + 8


def test_a_limit_in_samples_is_reached_and_hardly_passed() -> None:
    job = job_file(batch_size=32, portion_batches=8, samples=3200)
    outcome = Simulation(job, LeastSquares(samples=64)).run()
    assert 3200 <= outcome.store.run["samples"] < 3200 + 64


def test_averaged_buffers_go_on_after_a_resume() -> None:
    """They count steps here: what was counted before the stop is not forgotten."""
    first = Simulation(job_file(workers=2, epochs=20.0), WithBuffers(samples=256)).run()
    before = first.store.files[first.store.run["checkpoint"]["path"]]["shard-0.safetensors"]
    counted = float(before["averaged"][0])
    again = Simulation(
        job_file(workers=2, epochs=20.25), WithBuffers(samples=256), store=first.store
    ).run()
    after = again.store.files[again.store.run["checkpoint"]["path"]]["shard-0.safetensors"]
    assert float(after["averaged"][0]) > counted > 0


@pytest.mark.parametrize("algorithm", ["sync", "local-sgd"])
def test_averaged_buffers_stay_as_they_were_until_somebody_has_computed(algorithm: str) -> None:
    """Who joins a barrier in a run that goes on pushes before it has computed anything."""
    first = Simulation(
        job_file(workers=2, epochs=20.0, algorithm=(algorithm, {})), WithBuffers(samples=256)
    ).run()
    pushes = Watcher(m.Push)
    again = Simulation(
        job_file(workers=2, epochs=40.0, algorithm=(algorithm, {})),
        WithBuffers(samples=256),
        store=first.store,
        compute=ComputeOptions(step_s=1000.0),
        checkers=(pushes,),
    )
    again.request(10.0, "stop", STOP | {"grace_s": 5.0})
    outcome = again.run()
    assert {push.samples for push in pushes.messages()} == {0}
    assert outcome.store.run["checkpoint"]["number"] == 2
    before, after = (
        outcome.store.files[outcome.store.checkpoints[number]["path"]]["shard-0.safetensors"]
        for number in (1, 2)
    )
    assert after["averaged"].tolist() == before["averaged"].tolist() != [1.0]


def test_a_residual_outlives_a_worker_that_dies_before_it_comes_to_work() -> None:
    topk = ("topk", {"density": 0.1})
    first = Simulation(job_file(workers=2, epochs=5.0, compression=topk), LeastSquares()).run()
    topologies = Watcher(m.Topology)
    job = job_file(workers=2, epochs=6.0, compression=topk)
    simulation = Simulation(job, LeastSquares(), store=first.store, checkers=(topologies,))
    simulation.at(0.15, lambda: simulation.world.kill("worker-1"))
    assert simulation.run().state == "finished"
    assert {message.restore for message in topologies.messages()} != {""}
    assert all(message.restore for message in topologies.messages())


def topk_run(epochs: float, store: Store | None = None, *checkers: Checker) -> Simulation:
    job = job_file(workers=2, epochs=epochs, compression=("topk", {"density": 0.1}))
    return Simulation(job, LeastSquares(), store=store, checkers=checkers)


def saved_residuals(store: Store) -> list[np.ndarray]:
    files = store.files[store.newest()]
    return [files[f"worker-{i}.safetensors"]["residual"] for i in (0, 1)]


class StopsWhileRestoring(Checker):
    """The run is stopped soon after a worker has begun to load what it had not pushed."""

    simulation: Simulation
    stopped = False

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, LoadArrays) and process.name == "worker-1" and not self.stopped:
            self.stopped = True
            self.simulation.request(process.timeline.now + 2.0, "stop", STOP)


def test_a_stop_while_residuals_are_on_their_way_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = topk_run(5.0).run().store
    before = saved_residuals(store)
    monkeypatch.setattr(arrays, "LOAD_S", 5.0)
    stops = StopsWhileRestoring()
    stops.simulation = simulation = topk_run(1000.0, store, stops)
    assert simulation.run().state == "stopped"
    assert stops.stopped
    assert np.abs(before).max(axis=1).min() > 0
    np.testing.assert_array_equal(saved_residuals(store), before)


class DiesAfterAsking(Checker):
    """worker-1 dies when it has asked for data, and worker-0 is late."""

    simulation: Simulation
    killed: ClassVar[dict[type, str]] = {m.ModelReady: "worker-0", m.LeaseRequest: "worker-1"}

    def __init__(self) -> None:
        self.left = dict(self.killed)

    def on_effect(self, process: Any, effect: Any) -> None:
        message = effect.message if isinstance(effect, Send) else None
        if self.left.get(type(message)) == process.name:
            del self.left[type(message)]
            world = self.simulation.world
            world.timeline.after(0.02, lambda: world.kill(process.name))


def test_a_residual_outlives_a_worker_that_dies_before_the_others_have_come_to_work() -> None:
    store = topk_run(5.0).run().store
    topologies, dies = Watcher(m.Topology), DiesAfterAsking()
    dies.simulation = simulation = topk_run(6.0, store, topologies, dies)
    assert simulation.run().state == "finished"
    assert not dies.left
    assert all(message.restore for message in topologies.messages())


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.011, 0.018])
def test_a_replaced_replica_of_a_barrier_is_late_once_and_then_waited_for(delay_s: float) -> None:
    acks = Watcher(m.Ack)
    job = job_file(workers=3, servers=2, seconds=6.0, algorithm=("sync", {}))
    simulation = Simulation(
        job,
        LeastSquares(samples=256),
        network=NetworkOptions(link=SimLink(latency_s=0.02)),
        compute=ComputeOptions(step_s=0.02, spread=0.0),
        checkers=(acks,),
    )
    simulation.at(2.0 + delay_s, lambda: simulation.world.kill("worker-1"))
    simulation.run(60)
    late = [ack for ack in acks.messages() if ack.outcome == m.LATE]
    assert len(late) <= 2


def test_a_push_that_waits_in_a_barrier_is_not_sent_again_and_again() -> None:
    pushes = Watcher(m.Push)
    job = job_file(workers=2, epochs=1.0, algorithm=("sync", {}))
    compute = ComputeOptions(step_s=0.1, slow={1: 60.0})
    Simulation(job, LeastSquares(samples=64), compute=compute, checkers=(pushes,)).run()
    sent = pushes.messages("worker-0")
    assert len(sent) <= 2 * len({push.seq for push in sent})


def test_an_evaluation_that_never_ends_is_ended() -> None:
    job = job_file(workers=2, epochs=3.0, evaluate_epochs=1.0, restarts_max=1)
    simulation = Simulation(
        job, LeastSquares(samples=256), compute=ComputeOptions(step_s=0.02, evaluate_s=1e7)
    )
    outcome = simulation.run(700.0)
    assert any("its evaluation does not end" in event[3] for event in outcome.store.events)


def test_a_setting_that_comes_before_the_shard_is_in_force_when_it_comes() -> None:
    server = Server(
        Register("run", "server", "server-0", 1, 1, "host", "0"),
        job_file(),
        "address",
        registry.load("algorithms", "downpour"),
        registry.load("optimizers", "sgd"),
        registry.load("compressors", "none"),
    )
    server.handle(Started(), 0.0)
    for message in (
        m.Welcome("server-0", 0, 1, b"", {}),
        m.ChangeSettings(1, {"lr": 0.001}),
        m.Assign((0, 4), layout_of(4).to_bytes(), ""),
    ):
        server.handle(Received("coordinator", message), 0.1)
    assert server.serving is not None
    assert server.serving.shard.optimizer.lr == 0.001


def test_an_evaluation_that_takes_long_is_seen() -> None:
    job = job_file(workers=2, epochs=3.0, evaluate_epochs=1.0)
    simulation = Simulation(
        job, LeastSquares(samples=256), compute=ComputeOptions(step_s=0.02, evaluate_s=1e7)
    )
    outcome = simulation.run(200.0)
    row = outcome.store.daemons["worker-0"]
    assert row["state"] == "slow"
    assert row["phase"].startswith("in one evaluation for ")


def test_a_run_that_goes_on_with_fewer_workers_says_what_is_lost() -> None:
    topk = ("topk", {"density": 0.1})
    first = Simulation(job_file(workers=3, epochs=2.0, compression=topk), LeastSquares()).run()
    fewer = job_file(workers=1, epochs=3.0, compression=topk)
    outcome = Simulation(fewer, LeastSquares(), store=first.store).run()
    assert [text.split()[1] for text in outcome.store.texts("lost")] == ["worker-1", "worker-2"]


@pytest.mark.parametrize("coordinator_dies", [False, True])
def test_a_run_ends_when_the_last_worker_that_could_work_has_been_removed(
    coordinator_dies: bool,
) -> None:
    """worker-0 is quarantined while worker-1 finishes what it has, to leave."""
    job = job_file(workers=2, seconds=200.0, portion_batches=4)
    compute = ComputeOptions(step_s=0.5, slow={1: 4.0})
    simulation = Simulation(job, LeastSquares(), compute=compute)
    simulation.request(10.0, "scale", {"workers": 1})
    simulation.at(10.1, lambda: simulation.world.process("worker-0").end(EXIT_POISONED))
    if coordinator_dies:
        simulation.at(10.2, lambda: simulation.world.kill(COORDINATOR))
    outcome = simulation.run(400.0)
    assert outcome.state == "failed"
    assert outcome.store.texts("state")[-1].startswith("failed: no worker is left: worker-0: ")
    assert list(outcome.store.texts("quarantine")), "that came first"
    assert outcome.seconds < 60.0


def poisoned(checkpoint_s: float) -> Simulation:
    """A run that has failed after 30 seconds: nobody could use what its workers computed."""
    job = job_file(workers=2, epochs=1000.0, checkpoint_s=checkpoint_s)
    compute = ComputeOptions(step_s=0.2)
    simulation = Simulation(job, LeastSquares(samples=1024), compute=compute)

    def poison(name: str) -> None:
        worker = simulation.world.process(name)
        worker.exit_code = EXIT_POISONED
        worker.end(EXIT_POISONED)

    for name in ("worker-0", "worker-1"):
        simulation.at(30.0, partial(poison, name))
    assert simulation.run().state == "failed"
    return simulation


def test_what_is_saved_because_the_run_failed_says_so() -> None:
    store = poisoned(checkpoint_s=20.0).world.store
    first, last = (store.manifests[path] for path in sorted(store.manifests))
    assert FAILURE not in first
    assert last[FAILURE].startswith("no worker is left: worker-")


def test_a_run_that_failed_is_not_saved_again_as_soon_as_it_is_brought_back() -> None:
    """It may fail again at once: what is ruined would count as a good one each time."""
    simulation = poisoned(checkpoint_s=20.0)
    saved = len(simulation.world.store.manifests)
    world = simulation.world
    world.restart_coordinator(lambda: replace(world.past(), gone_s=3600.0))
    simulation.run(world.timeline.now + 15.0)
    assert simulation.store.run["state"] == "degraded", "it is brought back"
    assert len(simulation.world.store.manifests) == saved
