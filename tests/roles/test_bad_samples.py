"""A run goes on without so many samples of an epoch, and ends with one more."""

from __future__ import annotations

from typing import TypeGuard

from dlctl import messages as m
from dlctl import registry
from dlctl.config import Data, Job, JobFile, Workers
from dlctl.machine import Effect, Received, Send, Started
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import AddEvent
from dlctl.roles.coordinator.registration import Past
from dlctl.roles.protocol.keyring import Keyring

JOB = JobFile(
    job=Job(name="torn", task="train.py:task"),
    workers=Workers(count=2),
    data=Data(bad_samples_max=2),
)


def is_of_sample(effect: Effect) -> TypeGuard[AddEvent]:
    return isinstance(effect, AddEvent) and effect.kind in ("sample", "error")


class Led:
    def __init__(self) -> None:
        method = registry.load("algorithms", JOB.algorithm.name)
        self.machine = Coordinator("run-1", JOB, Keyring(b"key"), method, Past())
        self.machine.handle(Started(), 1.0)
        for slot in (0, 1):
            worker = self.machine.members.daemons[f"worker-{slot}"]
            self.machine.start_daemon(worker, 1.0)
            worker.registered, worker.peer, worker.term = True, b"%d" % slot, 1
        self.machine.context.clear()

    def fails(self, slot: int, data_epoch: int, sample: int, term: int = 1) -> list[str]:
        """A sample could not be loaded. Returns the events; every word is answered."""
        message = m.SampleFailed(slot, term, data_epoch, sample, "it is torn", "the traceback")
        effects: list[Effect] = self.machine.handle(Received(b"%d" % slot, message), 2.0)
        sent = [e.message for e in effects if isinstance(e, Send)]
        assert m.SampleNoted(data_epoch, sample) in sent
        return [f"{e.kind} {e.daemon}: {e.text}" for e in effects if is_of_sample(e)]

    @property
    def reason(self) -> str:
        end = self.machine.run.shutdown
        return f"{end.state}: {end.reason}" if end is not None else ""


def test_each_sample_counts_once_in_an_epoch_whoever_could_not_load_it() -> None:
    led = Led()
    assert led.fails(0, 0, 7) == [
        "sample worker-0: sample 7 could not be loaded (1 of at most 2 in epoch 0): it is torn"
    ]
    assert led.fails(0, 0, 7) == led.fails(1, 0, 7) == []
    assert led.fails(1, 0, 9, term=2) == [], "a process that is not there any more"
    assert "(2 of at most 2 in epoch 0)" in led.fails(1, 0, 9)[0]
    assert "(1 of at most 2 in epoch 1)" in led.fails(1, 1, 9)[0]
    assert led.reason == ""


def test_one_more_ends_the_run_with_its_error_and_the_count() -> None:
    led = Led()
    for slot, sample in ((0, 1), (1, 2)):
        led.fails(slot, 3, sample)
    said = "it is torn; 3 samples of epoch 3 could not be loaded, and data.bad_samples_max is 2"
    assert f"error worker-1: {said}" in led.fails(1, 3, 3)
    assert led.reason == f"failed: worker-1: {said}"
    assert len(led.fails(0, 3, 4)) == 1, "the end is said once"
