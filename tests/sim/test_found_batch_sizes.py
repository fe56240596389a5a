"""One worker finds the batch size; all have it, whoever dies, and the run keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl import registry
from dlctl.job.config import JobFile
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import Remember
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import BuildModel, Compute
from dlctl.roles.protocol.keyring import Keyring
from dlctl.sim.checkers.base import Checker
from dlctl.sim.drivers import FOUND, ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Received, Send, Started

AUTO: Any = "auto"
LAYOUT = Layout((TensorEntry("weight", TRAINED, (3,), "float32", ()),)).to_bytes()


def auto_job(**more: Any) -> JobFile:
    return job_file(
        workers=3, servers=2, optimizer=ACCOUNT, batch_size=AUTO, portion_batches=2, **more
    )


class Seen(Checker):
    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.finders: list[str] = []

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self.sizes.add(effect.step_samples)
        if isinstance(effect, BuildModel) and effect.finds:
            self.finders.append(process.name)


@pytest.mark.parametrize("killed", [(), (COORDINATOR, "worker-0")])
def test_all_workers_have_what_the_first_one_has_found(killed: tuple[str, ...]) -> None:
    problem, seen = Ledger(shards=2, samples=512, cells=300), Seen()
    checkers = (*ledger_checkers(problem, 2, once=not killed), seen)
    simulation = Simulation(
        auto_job(),
        problem,
        seed=1,
        faults=Faults(),
        checkers=checkers,
        compute=ComputeOptions(step_s=0.1),
    )
    for number, name in enumerate(killed):
        simulation.at(0.5 + number, lambda name=name: simulation.world.kill(name))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert seen.sizes == {FOUND}
    assert seen.finders == ["worker-0"], "who comes later is told"
    assert outcome.store.run["batch_size"] == FOUND
    assert len(outcome.store.texts("batch")) == 1
    assert outcome.store.run["samples"] >= 2 * 512
    starts = outcome.store.texts("start")
    assert ("worker-0 starts, incarnation 2" in starts) == bool(killed)


class Led:
    def __init__(self, past: Past) -> None:
        method = registry.load("algorithms", "downpour")
        self.machine = Coordinator("run-1", auto_job(), Keyring(b"key"), method, past)
        self.memory: dict[str, Any] = dict(past.memory)
        self._handle(Started())
        for name in ("worker-0", "worker-1"):
            worker = self.machine.members.daemons[name]
            if not worker.alive:
                self.machine.start_daemon(worker, 1.0)

    def _handle(self, event: Any) -> list[Any]:
        effects = self.machine.handle(event, 1.0)
        self.memory |= {e.key: e.value for e in effects if isinstance(e, Remember)}
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def registers(self, name: str) -> m.Welcome:
        number = self.machine.members.daemons[name].incarnation
        register = m.Register("run-1", "worker", name, number, 17, "here", "0.1.0")
        sent = self._handle(Received(name.encode(), register))
        return next(each for each in sent if isinstance(each, m.Welcome))

    def builds(self, name: str, batch_size: int = 0) -> None:
        self._handle(Received(name.encode(), m.ModelReady(name, LAYOUT, 64, batch_size=batch_size)))


def test_only_the_first_worker_is_told_to_find_it_and_the_others_wait() -> None:
    led = Led(Past())
    assert led.registers("worker-0").finds
    assert not led.registers("worker-1").finds
    led.builds("worker-1")
    assert led.machine.data.dataset.samples == 0, "how large are portions?"
    led.builds("worker-0", 16)
    assert led.machine.data.pool.portion_samples == 2 * 16
    led.builds("worker-0", 64)
    assert led.machine.data.batch_size == 16, "the first word counts"
    again = Led(Past(memory=led.memory, terms={"worker-0": 1, "worker-1": 1}))
    assert again.machine.data.batch_size == 16
    assert again.machine.run.job.workers.batch_size == 16


def test_a_run_that_goes_on_from_a_checkpoint_keeps_it() -> None:
    data = {"dataset_samples": 64, "portion_samples": 32, "complete_epochs": [],
            "portions": [[0, 1]], "batch_size": 16}  # fmt: skip
    rows = Layout.from_bytes(LAYOUT).to_rows()
    led = Led(Past(restore="checkpoints/1", manifest={"layout": rows, "data": data}))
    assert not led.registers("worker-0").finds
    led.builds("worker-0")
    assert led.machine.data.pool.to_json()["portions"] == [[0, 1]]
