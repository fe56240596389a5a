"""Frozen parameters are kept once, by the first worker; who has built others loads the run's."""

from __future__ import annotations

import pytest
from simulated import Watcher, job_file

from dlctl.job.config import Host
from dlctl.job.placement import place
from dlctl.model import frozen
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import WithFrozen
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

HOSTS = (Host(ssh="h1"), Host(ssh="h2"))


class Recorded(WithFrozen):
    """What the model of each process has, as it changes."""

    def __init__(self, others=()) -> None:
        super().__init__(others)
        self.models: list[list[bytes]] = []

    def frozen(self, slot: int) -> list[bytes]:
        self.models.append(super().frozen(slot))
        return self.models[-1]


def run(problem, *watchers, hosts=(), store=None) -> Outcome:
    job = job_file(workers=3, epochs=3.0, hosts=hosts, checkpoint_s=0.15)
    return Simulation(job, problem, seed=0, store=store, checkers=watchers).run()


def all_are(problem: Recorded, slot: int) -> bool:
    return all(model == WithFrozen.frozen(problem, slot) for model in problem.models)


def shared(outcome: Outcome) -> list[dict]:
    """What the checkpoints say of the file; each of them is whole."""
    store = outcome.store
    assert not any(store.verify(directory) for directory in store.manifests)
    return [manifest["frozen"] for manifest in store.manifests.values()]


def test_one_worker_keeps_them_and_nobody_else_receives_a_byte():
    problem, kept, asked = Recorded(), Watcher(m.KeepFrozen), Watcher(m.ReadFile)
    outcome = run(problem, kept, asked, hosts=HOSTS)
    assert outcome.state == "finished"
    assert all_are(problem, 0)
    assert len({question.file for question in kept.messages(COORDINATOR)}) == 1
    questions = {question.file for question in asked.messages("worker-1")}
    assert not [file for file in questions if file.startswith("frozen")]
    (name,) = outcome.store.frozen
    parts = shared(outcome)
    assert len(parts) >= 2
    assert {part["file"] for part in parts} == {name.removeprefix("frozen/")}


@pytest.mark.parametrize("hosts", [(), HOSTS])
def test_who_has_built_others_receives_those_and_no_more(hosts):
    """Of 2,048 bytes 48 differ; the last byte of the file always comes."""
    problem = Recorded(others={2})
    came = Watcher(m.FileData)
    outcome = run(problem, came, hosts=hosts)
    assert outcome.state == "finished"
    assert all_are(problem, 0)
    assert any("other values for 1 of 2" in text for text in outcome.store.texts("frozen"))
    pieces = [d for d in came.messages(COORDINATOR) if d.file.startswith("frozen")]
    is_away = place(outcome.world.job)["worker-2"] != "agent-0"
    assert sum(len(piece.data) for piece in pieces) == (49 if is_away else 0)


class Bytes(Checker):
    """Of all that is said, by whomever, from one moment on until a worker asks for data."""

    def __init__(self, since_s: float, name: str) -> None:
        self.since_s, self.name, self.nbytes, self.is_over = since_s, name, 0, False

    def on_effect(self, process, effect) -> None:
        if not isinstance(effect, Send) or process.timeline.now < self.since_s or self.is_over:
            return
        self.is_over = process.name == self.name and isinstance(effect.message, m.LeaseRequest)
        self.nbytes += sum(len(frame) for frame in codec.encode(effect.message))


def test_a_worker_that_is_added_receives_less_than_a_hundredth_of_the_base():
    """Even if all that anybody says meanwhile were for it."""
    problem, sent = WithFrozen(base_bytes=4_000_000), Bytes(3.0, "worker-2")
    slow = ComputeOptions(step_s=0.5)
    simulation = Simulation(
        job_file(workers=2, seconds=6.0), problem, seed=0, checkers=(sent,), compute=slow
    )
    simulation.request(3.0, "scale", {"workers": 3})
    assert simulation.run().state == "finished"
    assert sent.is_over
    assert sent.nbytes < 40_000


def test_a_run_that_goes_on_has_those_of_its_checkpoint_whoever_builds_them():
    first = run(Recorded())
    problem = Recorded(others={0, 1, 2})
    outcome = run(problem, store=first.store, hosts=HOSTS)
    assert outcome.state == "finished"
    assert all_are(problem, 9)
    assert len(outcome.store.frozen) == 1
    assert {part["sha256"] for part in shared(outcome)} == {shared(first)[0]["sha256"]}


class Killed(Checker):
    """A process dies as it sends such a message for the first time."""

    def __init__(self, name: str, kind: type) -> None:
        self.name, self.kind, self.is_done = name, kind, False

    def on_effect(self, process, effect) -> None:
        is_it = isinstance(effect, Send) and isinstance(effect.message, self.kind)
        if is_it and process.name == self.name and not self.is_done:
            self.is_done = True
            process.end(-9)


@pytest.mark.per_commit(4)
@pytest.mark.parametrize("hosts", [(), HOSTS])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("worker-0", m.ModelReady),
        ("worker-0", m.FrozenKept),
        ("coordinator", m.KeepFrozen),
        ("coordinator", m.Topology),
        ("worker-2", m.Join),
    ],
)
def test_a_process_that_dies_on_the_way_leaves_no_two_kinds(name, kind, hosts):
    problem, killed = Recorded(others={0, 2}), Killed(name, kind)
    outcome = run(problem, killed, hosts=hosts)
    assert killed.is_done
    assert outcome.state == "finished", outcome.store.run
    (part,) = {part["digests"] for part in shared(outcome)}
    alive = [model for model in problem.models if b"".join(map(frozen.digest, model)).hex() == part]
    assert len(alive) >= 3


def test_a_file_that_cannot_be_written_fails_the_run_in_words():
    simulation = Simulation(job_file(workers=2), Recorded(), seed=0)
    simulation.at(0.15, lambda: setattr(simulation.world.disk, "tight", 1))
    outcome = simulation.run()
    assert outcome.state == "failed"
    words = "cannot keep the frozen parameters of the model: no space left on device"
    assert outcome.store.run["reason"] == words
