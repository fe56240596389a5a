"""A coordinator's memory: the shapes that are stored, and what the next one makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlctl import registry
from dlctl.job.config import Choice, Data, Job, JobFile, Servers, Stop, Workers
from dlctl.records.memory import (
    Clock,
    End,
    EvaluationMemory,
    Finish,
    LeadState,
    Memory,
    Norm,
    Piece,
    Quorum,
    RunMemory,
    Work,
)
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.coordinator.records import Remember
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire.machine import DeadlineReached, Effect, Received, Send, Started
from dlctl.wire.messages import Lease, LeaseRequest, Report

OLD = json.loads((Path(__file__).parent / "old_memory.json").read_text())
"""Written by an earlier version, in the middle of a run of two workers and two servers."""
NOW = 1000.0


@pytest.mark.parametrize(
    ("piece", "stored"),
    [
        (RunMemory("running", "", True), ["running", "", True]),
        (Clock(7.0, 2.5), [7.0, 2.5]),
        (Work(9, 72, 0.5, 64, (1, 3), None), [9, 72, 0.5, 64, [1, 3], None]),
        (
            EvaluationMemory(2.0, ["worker-0", 4, 9, False, False]),
            [2.0, ["worker-0", 4, 9, False, False]],
        ),
        (Finish(1, {"text": "done"}), [1, {"text": "done"}]),
        (End("stopped", "why", 30.0, False), ["stopped", "why", 30.0, False]),
        (Quorum(3, ((0, 1), (2, 1))), [3, [[0, 1], [2, 1]]]),
        (Norm(4, 1.5), [4, 1.5]),
        (LeadState(5, {"a": 1}, {}), [5, {"a": 1}, {}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_piece_is_stored_as_it_has_always_been(piece: Piece, stored: list[Any]) -> None:
    assert json.loads(json.dumps(piece.to_json())) == stored
    read = Memory({piece.KEY: stored}).piece(type(piece))
    assert read is not None
    assert json.loads(json.dumps(read.to_json())) == stored
    assert Memory({}).piece(type(piece)) is None


@pytest.mark.parametrize(("released", "is_released"), [(None, False), (True, True), (0.0, True)])
def test_an_old_database_has_a_time_where_a_release_is_noted(released, is_released) -> None:
    assert Memory({"run": ["running", "", released]}).has_released is is_released


def successor(**changes: Any) -> tuple[Coordinator, list[Effect]]:
    """A coordinator that continues from the old memory, and what it does first."""
    job = JobFile(
        job=Job(name="old", task="train.py:task", stop=Stop(epochs=6)),
        algorithm=Choice(name="downpour"),
        servers=Servers(count=2),
        workers=Workers(count=2, batch_size=4),
        data=Data(portion_batches=2),
    )
    past = Past(
        terms=dict.fromkeys(("server-0", "server-1", "worker-0", "worker-1"), 1),
        memory={**OLD, **changes}, agents={"agent-0": 1}, checkpoints=2,
    )  # fmt: skip
    method = registry.load("algorithms", "downpour")
    machine = Coordinator("run-1", job, Keyring(b"key"), method, past)
    return machine, machine.handle(Started(), NOW)


def remembered(effects: list[Effect]) -> dict[str, Any]:
    found = {e.key: e.value for e in effects if isinstance(e, Remember)}
    return dict(json.loads(json.dumps(found)))


def test_the_next_coordinator_goes_on_from_the_memory_of_an_old_one() -> None:
    machine, effects = successor(keys=Keyring(b"key").fingerprint)
    found, before = remembered(effects), {**OLD, "keys": Keyring(b"key").fingerprint}
    assert [key for key, value in found.items() if value is None and key in before] == []
    differs = {key for key, value in found.items() if key in before and before[key] != value}
    assert {key.partition("/")[0] for key in differs} <= {"clock", "numbers", "daemon"}
    assert machine.run.state == "running"
    worked_s, _ = OLD["clock"]
    assert machine.run.released_at == NOW - worked_s
    steps, samples, *_ = OLD["work"]
    assert (machine.progress.steps, machine.progress.samples) == (steps, samples)
    assert machine.members.live_slots() == (0, 1)
    request, portion, data_epoch, start, stop, *_ = OLD["answer/1"]
    again = LeaseRequest(1, 1, request, False)
    answered = machine.handle(Received(b"worker-1", again), NOW)
    (lease,) = [e.message for e in answered if isinstance(e, Send) and type(e.message) is Lease]
    assert lease == Lease(request, portion, data_epoch, start, stop)


def test_an_event_that_changes_nothing_is_followed_by_no_record() -> None:
    machine, _ = successor()
    report = Report("worker-0", 1, "computing", "", {"portions": 1})
    machine.handle(Received(b"worker-0", report), NOW)
    assert remembered(machine.handle(Received(b"worker-0", report), NOW + 0.01)) == {}
    assert remembered(machine.handle(DeadlineReached(), NOW + 0.02)) == {}
    assert set(remembered(machine.handle(DeadlineReached(), NOW + 1.0))) == {"clock"}


def test_whether_the_release_is_on_record_is_learned_from_the_first_records() -> None:
    """Of a coordinator that died before it: else leases would leave before the next one's."""
    machine, effects = successor(run=["starting", "", None])
    lasting = Lasting()
    for effect in effects:
        if isinstance(effect, Remember):
            lasting.remembers(effect.key, effect.value)
    lasting.written()
    lasting.remembers("run", ["running", "", True])
    assert not lasting.may_leave(Lease(1, 0, 0, 0, 8))
    assert machine.run.released_at is None
