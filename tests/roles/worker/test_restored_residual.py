"""What a worker has not pushed: it does nothing without it, and saves it even while it hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.compress.topk import TopK
from dlctl.job import config
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import (
    ArraysLoaded,
    Compute,
    LoadArrays,
    ModelBuilt,
    SaveArrays,
    TakeComputeState,
)
from dlctl.roles.worker.worker import Worker
from dlctl.sim.objectives import layout_of
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Event, Received, Send, Started
from dlctl.wire.messages import Register

SIZE = 4
RESIDUAL = np.arange(1, SIZE + 1, dtype=np.float32)
JOB = config.JobFile(
    job=config.Job(name="alone", task="none", seed=0, stop=config.Stop(epochs=1.0)),
    algorithm=config.Choice(name="downpour"),
    compression=config.Choice(name="topk", options={"density": 0.5, "dense_below": 0}),
)


class Play:
    """The only worker of a run with one server; `done` is all that it has ever wanted done."""

    def __init__(self, job: config.JobFile = JOB) -> None:
        registration = Register("run", "worker", "worker-0", 1, 1, "host", "1")
        compressor = TopK(TopK.Options(density=0.5, dense_below=0))
        self.worker = Worker(registration, job, DOWNPOUR, compressor)
        self.done: list[Effect] = []
        self.happens(Started())
        self.hears(m.Welcome("worker-0", 0, 1, b"", {}))
        none, layout = np.zeros(0), layout_of(SIZE).to_bytes()
        self.happens(ModelBuilt(m.ModelReady("", layout, 8), np.zeros(SIZE, np.float32), none))
        self.hears(m.Topology(("address",), ("",), (0, SIZE), False, "ckpt/000000000120-3"))

    def happens(self, event: Event) -> None:
        self.done += self.worker.handle(event, 0.0)

    def hears(self, message: m.Message, peer: str = COORDINATOR) -> None:
        self.happens(Received(peer, message))

    def joined(self, term: int = 1) -> None:
        self.hears(m.Joined(0, term, 0, 0, SIZE, True, 0), "server-0")

    def of(self, kind: type) -> list[Any]:
        """The effects, or messages, of a type."""
        return [
            what
            for effect in self.done
            for what in (effect, effect.message if isinstance(effect, Send) else None)
            if isinstance(what, kind)
        ]


def test_who_is_drained_and_saved_before_its_residual_has_come_saves_it_when_it_is_there() -> None:
    play = Play()
    play.joined()
    assert play.of(LoadArrays) == [LoadArrays("ckpt/000000000120-3")]
    play.hears(m.Drain("stopped"))
    play.hears(m.Save(4, "ckpt/000000000120-4"))
    play.hears(m.Save(4, "ckpt/000000000120-4"))
    assert play.of(SaveArrays) == play.of(m.Saved) == []
    play.happens(ArraysLoaded({"residual": RESIDUAL}, {}))
    (save,) = play.of(SaveArrays)
    np.testing.assert_array_equal(save.arrays["residual"], RESIDUAL)


def test_nothing_is_asked_for_before_the_residual_has_come() -> None:
    """Who has asked for data is taken for one that has all it needs."""
    play = Play()
    play.joined()
    assert play.of(m.LeaseRequest) == []
    assert play.worker.phase() == "loading its unpushed updates"
    play.happens(ArraysLoaded({"residual": RESIDUAL}, {}))
    assert len(play.of(m.LeaseRequest)) == 1


def test_a_server_that_is_joined_again_meanwhile_does_not_let_it_begin() -> None:
    play = Play()
    play.joined()
    play.hears(m.Moved(0, 2, "elsewhere", ""))
    play.joined(term=2)
    assert len(play.of(LoadArrays)) == 1
    assert play.of(m.LeaseRequest) == []


@pytest.mark.parametrize(
    ("name", "options", "saves"),
    [
        ("none", {}, True),
        ("sgd", {"lr": 0.1}, True),
        ("sgd", {"lr": 0.1, "momentum": 0.9}, False),
        ("mine:Optimizer", {"lr": 0.1}, False),
    ],
)
def test_who_hangs_in_a_batch_saves_unless_torch_keeps_something(
    name: str, options: dict[str, Any], saves: bool
) -> None:
    """What torch keeps is there when the batch is done, which it never is."""
    play = Play(replace(JOB, inner=config.Choice(name=name, options=options)))
    play.joined()
    play.happens(ArraysLoaded({"residual": RESIDUAL}, {}))
    play.hears(m.Lease(play.of(m.LeaseRequest)[0].request, 0, 0, 0, 8))
    (fetch,) = play.of(m.Fetch)
    values = np.zeros(SIZE, np.float32)
    play.hears(m.Parameters(0, 1, fetch.request, 0, values), "server-0")
    assert len(play.of(Compute)) == 1
    play.hears(m.Save(4, "ckpt/000000000120-4"))
    assert len(play.of(SaveArrays)) == saves
    assert play.of(TakeComputeState) == []
