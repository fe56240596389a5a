"""What may go wrong at the very end of a run, or long after its beginning, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, Watcher, job_file

from dlctl.roles.coordinator.records import CompleteCheckpoint
from dlctl.shards.errors import StateHeld
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.states import KeptStates
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

pytestmark = pytest.mark.long

COMPUTE = ComputeOptions(step_s=0.1, build_s=0.1)


def ledger(epochs: float = 4.0, faults: Faults | None = None) -> Simulation:
    job = job_file(2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=epochs)
    return Simulation(
        job, Ledger(shards=2, cells=600), 1, compute=COMPUTE, faults=faults or Faults()
    )


def fill_the_disk(simulation: Simulation, at_s: float) -> None:
    simulation.at(at_s, lambda: setattr(simulation.world.disk, "full", 1))


def judge_kept(outcome: Outcome, *why: str) -> None:
    """The run has failed with its last checkpoint, and `recover` finds its shards."""
    assert outcome.state == "failed"
    assert "but its last checkpoint failed: " in outcome.reason
    assert all(words in outcome.reason for words in why), outcome.reason
    assert sorted(outcome.store.states) == [0, 1]


@pytest.mark.parametrize("is_stopped", [False, True], ids=["finished", "stopped"])
def test_when_the_last_checkpoint_fails_the_shards_stay_and_the_run_says_so(is_stopped: bool):
    simulation = ledger(50.0 if is_stopped else 4.0, Faults(heal_at_s=1000.0))
    fill_the_disk(simulation, 1.0)
    if is_stopped:
        simulation.request(3.0, "stop", {})
    judge_kept(simulation.run(200.0), "server-", "no space left on device")


def test_shards_that_were_closed_for_a_checkpoint_that_failed_open_when_the_run_goes_on():
    saves = Watcher(m.Save)
    first = ledger(50.0, Faults(heal_at_s=1000.0))
    first.world.observers.append(saves)
    fill_the_disk(first, 1.0)
    first.request(3.0, "stop", {})
    store = first.run(200.0).store
    assert store.run["state"] == "failed"
    done = store.run["step"]
    job = job_file(2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, steps=done + 40)
    opened = Watcher(m.Reopen)
    outcome = Simulation(
        job, Ledger(shards=2, cells=600), 1, compute=COMPUTE, store=store,
        past=store.past(agents={}), checkers=(opened,),
    ).run(200.0)  # fmt: skip
    assert {message.last for message in opened.messages()} == {saves.messages()[-1].checkpoint}
    assert outcome.state == "finished"


def test_a_shard_that_has_no_room_in_the_end_says_so_and_stays():
    """With durability "disk" its server ends: that the shard is closed has to be in the journal."""
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=50.0, durability="disk"
    )
    simulation = Simulation(job, Ledger(shards=2, cells=600), 1, compute=COMPUTE)

    class Full(Checker):
        def on_effect(self, process: Any, effect: Any) -> None:
            if isinstance(effect, Send) and isinstance(effect.message, m.Save):
                simulation.world.disk.full = 1

    simulation.world.observers.append(Full())
    simulation.request(3.0, "stop", {})
    judge_kept(simulation.run(200.0), "server-", "no space left on device")


def test_a_last_checkpoint_that_does_not_come_to_its_end_is_none():
    """Its manifest is being written, for ever; an earlier checkpoint was good."""
    simulation = ledger(50.0)
    simulation.request(1.0, "checkpoint", {})

    def hang() -> None:
        simulation.world.coordinator.perform(CompleteCheckpoint, lambda effect: None)

    simulation.at(2.0, hang)
    simulation.request(3.0, "stop", {})
    outcome = simulation.run(400.0)
    judge_kept(outcome, "gave up waiting for the manifest")
    assert len(outcome.store.manifests) == 1


def test_a_last_checkpoint_that_fails_is_tried_again():
    simulation = ledger()
    fill_the_disk(simulation, 1.0)
    outcome = simulation.run(200.0)
    assert outcome.state == "finished"
    errors = [row["error"] for row in outcome.store.checkpoints.values()]
    assert "no space left" in errors[0]
    assert errors[-1] == ""


@pytest.mark.per_commit(3)
@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("is_stopped", [False, True], ids=["finished", "stopped"])
def test_a_coordinator_that_dies_while_all_exit_does_not_begin_the_end_anew(
    is_stopped: bool, count: int
):
    moment = Moment(name="coordinator", kind="Shutdown", count=count)
    simulation = ledger(50.0 if is_stopped else 4.0, Faults(moments=(moment,), heal_at_s=20.0))
    if is_stopped:
        simulation.request(3.0, "stop", {})
    outcome = simulation.run(400.0)
    assert outcome.state == ("stopped" if is_stopped else "finished")
    assert [row["error"] for row in outcome.store.checkpoints.values()] == [""]
    assert not [name for name in outcome.left_behind if not name.startswith("client")]


def test_a_coordinator_dies_long_after_the_checkpoint_is_gone_that_the_run_went_on_from():
    first = ledger(50.0)
    first.request(2.0, "stop", {})
    store = first.run(100.0).store
    began_with = store.newest()
    assert began_with
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=8.0, checkpoint_s=0.2
    )
    moment = Moment(name="coordinator", kind="PortionDone", count=40, direction="received")
    problem = Ledger(shards=2, cells=600)
    second = Simulation(
        job, problem, 1, compute=COMPUTE, faults=Faults(moments=(moment,)), store=store
    )
    outcome = second.run(200.0)
    assert began_with not in store.manifests, "it was removed long before"
    assert any("the coordinator is back" in text for text in store.texts("recover"))
    assert outcome.state == "finished"


def test_a_state_that_is_still_held_is_asked_for_again(monkeypatch):
    honest, held = KeptStates.reopen, iter([True])

    def reopen(self, spec):
        if spec.shard == 0 and next(held, False):
            raise StateHeld("another process has the state open", where="shard-0.state")
        return honest(self, spec)

    monkeypatch.setattr(KeptStates, "reopen", reopen)
    simulation = ledger()
    simulation.at(2.0, lambda: simulation.world.kill("server-0"))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished"
    assert len([text for text in outcome.store.texts("exit") if "server-0" in text]) == 2


def test_who_computes_nothing_leaves_first():
    class Bad(LeastSquares):
        def gradient(self, w, batch):
            loss, gradient = super().gradient(w, batch)
            return (float("nan"), gradient) if batch.slot == 0 else (loss, gradient)

    job = job_file(2, 1, epochs=20.0, nonfinite_steps_max=5)
    simulation = Simulation(job, Bad(), 1, compute=COMPUTE)
    simulation.request(4.0, "scale", {"workers": 1})
    outcome = simulation.run(3000.0)
    assert outcome.state == "finished"
    assert "worker-0 " in outcome.store.texts("quarantine")[0]


@pytest.mark.long
def test_a_worker_that_pushes_seldom_does_not_hold_checkpoints_up_for_ever():
    compute = ComputeOptions(step_s=2.0, build_s=0.1)
    job = job_file(
        1, 1, epochs=20.0, algorithm=("downpour", {"push_every_steps": 100}), checkpoint_s=60.0
    )
    outcome = Simulation(job, LeastSquares(), 1, compute=compute).run(3000.0)
    rows = outcome.store.checkpoints.values()
    assert [row["error"] for row in rows] == [""] * len(rows)
    assert len(rows) > 1
