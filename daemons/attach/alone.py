"""A run of one, for a script that nobody has started as a worker: `python train.py` trains as well.

The script's own optimiser steps; gradients that it gives to `run.optimizer` are steps of SGD. The
run is over after one pass over the data of `run.loader`.
"""

from __future__ import annotations

import sys
from functools import partial
from queue import SimpleQueue

import numpy as np

from daemons.attach.exchange import FromRole, InUserThread, Over
from daemons.attach.model_vector import ModelVector
from daemons.attach.stock import SharedStock
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.job.config import Job, JobFile, Workers
from dlctl.roles.protocol.loop_effects import (
    DataWanted,
    GiveData,
    LendModel,
    LoopLeft,
    LoopStepped,
)
from dlctl.wire.machine import Event
from dlctl.wire.messages import Array, Lease, ModelReady

LR = 0.01
"""Of the steps along gradients that are given to `run.optimizer`."""
STEPS_MAX = 1_000
"""After so many the model is lent again."""


class Alone:
    """A `run.RunLink` without a run."""

    slot = 0
    is_restart = False
    is_alone = True

    def __init__(self, model: ModelVector, own: UserOptimizer | None = None) -> None:
        self.job = JobFile(job=Job(name="alone"), workers=Workers(count=1))
        self.stock = SharedStock()
        self.inbox: SimpleQueue[FromRole] = SimpleQueue()
        self.recalled = False
        self.own = own
        self.takes_gradients = False
        """The script uses `run.optimizer`."""
        self._model = model
        self._samples = 0

    def join(self, ready: ModelReady) -> None:
        if ready.samples:
            self.stock.give(GiveData(Lease(1, 0, 0, 0, ready.samples)))
            self.stock.give(GiveData(None))
        is_sgd = self.takes_gradients and self.own is None
        who = f"with SGD of rate {LR:g}" if is_sgd else "with its own optimizer"
        length = "for one pass over its data" if ready.samples else "until its loop ends"
        print(f"dlctl: no run has started this script: alone, {who}, {length}", file=sys.stderr)
        self._lend()

    def offer(self, event: Event) -> None:
        match event:
            case DataWanted():
                self.stock.give(GiveData(None))
            case LoopStepped():
                self._on_stepped(event)
            case LoopLeft():
                self.inbox.put(Over("finished", "the script has left its loop"))

    def _on_stepped(self, event: LoopStepped) -> None:
        self._samples += sum(step.samples for step in event.steps)
        if event.gradient is not None and np.isfinite(event.norm):
            self.inbox.put(InUserThread(partial(self._step_along, event.gradient)))
        if event.is_dry:
            self.inbox.put(Over("finished", "the data has ended"))
            self.stock.wake()
        elif event.returns:
            self._lend()

    def _lend(self) -> None:
        takes = self.takes_gradients
        steps = 1 if takes else STEPS_MAX
        self.inbox.put(LendModel(steps, self._samples, steps_own=not takes, gather=takes))

    def _step_along(self, gradient: Array) -> None:
        if self.own is None:
            self._model.vector[:] -= LR * gradient
        else:
            self.own.step_along(gradient)
            self._model.gather()
