"""A training loop of the user in place of the worker's compute: the role and the method are the
same, no data is leased, and the loop goes on when its step is pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.algorithms.needs import Gradient, Need, NextBatch, NextData, Step
from dlctl.compress.none import Dense
from dlctl.job import config
from dlctl.roles.protocol.context import COORDINATOR, EXIT_POISONED
from dlctl.roles.protocol.effects import Compute, Computed, ModelBuilt
from dlctl.roles.protocol.loop_effects import (
    DataWanted,
    LendModel,
    LoopLeft,
    LoopStep,
    LoopStepped,
    PortionPart,
)
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.interface import StepSource
from dlctl.roles.worker.leases import Portion
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.services.base import Phase, Service
from dlctl.roles.worker.services.looping import Looping
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.settings import WorkTerms
from dlctl.roles.worker.worker import Worker
from dlctl.sim.objectives import layout_of
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Event, Exit, Received, Send, Started
from dlctl.wire.messages import Array, Register

SIZE = 3
SAMPLES = 5
JOB = config.JobFile(
    job=config.Job(name="alone", task="none", seed=0),
    algorithm=config.Choice(name="downpour", options={"push_every_steps": 1}),
    workers=config.Workers(nonfinite_steps_max=2),
)


class Loop(StepSource, Service[Any]):
    """What `run.step()` of a user's thread gives, as `Computed` events."""

    def __init__(
        self,
        links: Links,
        terms: WorkTerms,
        accounts: Accounts,
        writing: Writing,
        side: ReplicaSide,
        averaged: Array,
    ) -> None:
        self.averaged, self.draining, self.holds = averaged, False, False
        self._accounts, self._writing = accounts, writing
        self._came: Step | None = None
        self._is_told = False
        self._need: Need | None = None

    def services(self) -> Mapping[type[Need], Service[Any]]:
        return {NextData: self, Gradient: self}

    def on_event(self, event: Event, now: float) -> None:
        assert isinstance(event, Computed)
        if not event.is_usable:
            self._accounts.bad_gradients.discard("a step of the user")
            return
        number = self._writing.steps
        self._accounts.step_made(number, SAMPLES, 0.1, f"step {number} of the user")
        self._writing.steps += 1
        self._came = Step(event.gradient, SAMPLES, event.loss, event.norm)

    def begin(self, need: Need, now: float) -> None:
        self._need = need

    def poll(self, now: float) -> tuple[bool, Any]:
        if self._came is not None and isinstance(self._need, Gradient):
            step, self._came = self._came, None
            return True, step
        if self._came is not None:
            return True, NextBatch(0, 0, False)
        if self.draining:
            is_first, self._is_told = not self._is_told, True
            return is_first, None
        return False, None

    def has_ended(self) -> bool:
        return self.draining and self._is_told

    def phase(self) -> Phase:
        return Phase("waiting for the training loop")

    def drain(self) -> None:
        self.draining = True

    def recall(self) -> None: ...

    def is_computing(self) -> bool:
        return False

    def is_at_work(self) -> bool:
        return False

    def on_lease(self, lease: m.Lease, now: float) -> None: ...
    def on_done(self, done: list[Portion], now: float) -> None: ...
    def acted(self) -> None: ...
    def paused(self, now: float) -> None: ...

    def stuck_s(self, now: float, *, evaluates: bool) -> float:
        return 0.0

    def long_s(self, now: float) -> float:
        return 0.0

    def metrics(self, now: float) -> dict[str, Any]:
        return {"of_the_loop": 1}


class Play:
    """The only worker of a run with one server, which answers what it is asked."""

    def __init__(self, steps: Callable[..., StepSource] = Loop, job: config.JobFile = JOB) -> None:
        registration = Register("run", "worker", "worker-0", 1, 1, "host", "1")
        self.worker = Worker(registration, job, DOWNPOUR, Dense(Dense.Options()), steps=steps)
        self.done: list[Effect] = []
        self.version = 0
        layout = layout_of(SIZE).to_bytes()
        self.happens(Started())
        self.hears(m.Welcome("worker-0", 0, 1, b"", {}))
        self.model = np.zeros(SIZE, np.float32)
        self.happens(ModelBuilt(m.ModelReady("", layout, 8), self.model, np.zeros(0)))
        self.hears(m.Topology(("address",), ("",), (0, SIZE), False, ""))
        self.hears(m.Joined(0, 1, 0, 0, SIZE, True, 0), "server-0")

    def happens(self, event: Event, now: float = 0.0) -> None:
        effects = self.worker.handle(event, now)
        self.done += effects
        for message in [e.message for e in effects if isinstance(e, Send)]:
            match message:
                case m.Fetch():
                    values = np.full(SIZE, self.version, np.float32)
                    self.hears(
                        m.Parameters(0, 1, message.request, self.version, values), "server-0"
                    )
                case m.Push():
                    self.version += 1
                    ack = m.Ack(0, 1, message.seq, m.APPLIED, self.version, 0, message.seq + 1)
                    self.hears(ack, "server-0")

    def hears(self, message: m.Message, peer: str = COORDINATOR) -> None:
        self.happens(Received(peer, message))

    def step(self, *values: float) -> None:
        gradient = np.array(values, np.float32)
        is_usable = bool(np.isfinite(gradient).all())
        self.happens(Computed(1.0, gradient, np.zeros(0), 1.0, is_usable))

    def of(self, kind: type) -> list[Any]:
        found = (e.message if isinstance(e, Send) else e for e in self.done)
        return [each for each in found if isinstance(each, kind)]


def test_steps_of_a_loop_are_pushed_and_the_model_follows_without_a_lease_or_a_batch() -> None:
    play = Play()
    assert play.worker.phase() == "waiting for the training loop"
    for number in range(1, 4):
        play.step(number, 0.0, -number)
        pushes = play.of(m.Push)
        assert [push.delta.arrays[0].tolist() for push in pushes[-1:]] == [[number, 0.0, -number]]
        assert (len(pushes), pushes[-1].samples) == (number, SAMPLES)
    assert play.model.tolist() == [3.0] * SIZE, "it has read what its pushes have become"
    assert play.of(m.LeaseRequest) == play.of(Compute) == []
    play.happens(Received(COORDINATOR, m.Heard()), 5.0)
    assert play.of(m.Report)[-1].metrics["of_the_loop"] == 1
    assert play.of(m.Report)[-1].metrics["step"] == 3


def test_it_is_drained_saved_and_counted_out_like_any_other() -> None:
    play = Play()
    play.step(1.0, 1.0, 1.0)
    play.hears(m.Save(1, "ckpt/1"))
    assert not play.worker.training.has_unpushed_steps()
    play.hears(m.Drain("stopped"))
    assert play.worker.phase() == "drained"
    assert play.of(m.Drained)


def test_results_that_are_not_finite_end_it_with_the_code_of_any_other() -> None:
    play = Play()
    play.step(np.nan, 0.0, 0.0)
    assert not [e for e in play.done if getattr(e, "code", None) == EXIT_POISONED]
    play.step(np.nan, 0.0, 0.0)
    assert [e for e in play.done if getattr(e, "code", None) == EXIT_POISONED]
    assert not play.of(m.Push)


PORTION = 8


def loop_at_work(push_every_steps: int = 100) -> Play:
    """A loop with a portion of data and the model in its hands."""
    options = {"push_every_steps": push_every_steps}
    play = Play(Looping, replace(JOB, algorithm=replace(JOB.algorithm, options=options)))
    play.happens(DataWanted(now=True))
    (asked,) = play.of(m.LeaseRequest)
    play.hears(m.Lease(asked.request, 0, 0, 0, PORTION))
    assert len(play.of(LendModel)) == 1
    return play


def loop_step(play: Play, start: int, stop: int) -> None:
    """A step on these samples; the model goes back with its gradient."""
    pieces = (PortionPart(0, 0, start, stop),)
    gradient = np.full(SIZE, float(stop), np.float32)
    steps = (LoopStep(stop - start, 0.5, {}, pieces),)
    play.happens(LoopStepped(steps, np.zeros(0), True, gradient=gradient, norm=1.0))


def hand_back(play: Play) -> None:
    play.happens(LoopStepped((), np.zeros(0), returns=True, is_dry=True))


def exits(play: Play) -> list[tuple[int, str]]:
    return [(e.code, e.reason) for e in play.done if isinstance(e, Exit)]


def test_a_loop_that_leaves_pushes_what_it_has_made_and_frees_its_slot() -> None:
    play = loop_at_work()
    loop_step(play, 0, 1)
    play.done.clear()  # The first gradient is pushed at once.
    loop_step(play, 1, 3)
    loop_step(play, 3, 5)
    assert not play.of(m.Push), "the method pushes later"
    play.happens(LoopLeft("the script left its loop"))
    assert not play.of(m.Push)
    assert not exits(play)
    hand_back(play)
    (push,) = play.of(m.Push)
    assert (push.samples, push.delta.arrays[0].tolist()) == (4, [8.0] * SIZE)
    assert play.of(m.Drained)
    assert exits(play) == [(0, "the script left its loop")]
    assert not play.of(m.PortionDone), "the rest of its portion is for others"


def test_a_loop_that_leaves_at_the_end_of_its_data_has_done_all_of_it() -> None:
    play = loop_at_work()
    loop_step(play, 0, PORTION)
    play.happens(LoopLeft("enough"))
    (done,) = play.of(m.PortionDone)
    assert done.samples == PORTION
    assert not exits(play), "the run has not noted it yet"
    play.hears(m.PortionNoted(done.data_epoch, done.portion))
    assert exits(play) == [(0, "enough")]


def test_a_loop_that_leaves_before_its_first_step_leaves_at_once() -> None:
    play = loop_at_work()
    play.happens(LoopLeft("enough"))
    hand_back(play)
    assert exits(play) == [(0, "enough")]
    assert not play.of(m.Push)
    play.happens(DataWanted(now=True))
    assert len(play.of(m.LeaseRequest)) == 1, "it takes no more data"
