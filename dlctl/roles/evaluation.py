"""One evaluation: the servers' parameters and averaged buffers, beside the training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl import messages as m
from dlctl.roles.desk import Desk
from dlctl.roles.effects import RunEvaluation
from dlctl.roles.fetching import Fetched
from dlctl.roles.joining import buffers_key
from dlctl.roles.training import Training


@dataclass(slots=True)
class Evaluation:
    number: int
    fetched: Fetched
    buffers: m.Buffers | None = None
    running: bool = False

    @staticmethod
    def begin(number: int, training: Training, now: float) -> Evaluation:
        fetched = training.fetcher.start(0, whole=True)
        me, first = training.identity, training.channels[0]
        request = m.FetchBuffers(me.slot, me.epoch, fetched.request)
        training.desk.ask(buffers_key(fetched.request), first.peer, request, now)
        return Evaluation(number, fetched)

    def advance(self, training: Training, desk: Desk, now: float) -> None:
        """Run it as soon as everything has come and no gradient is being computed."""
        if self.running or self.buffers is None or not self.fetched.complete:
            return
        if not training.pause(now):
            return
        self.running = True
        size = training.channels[-1].hi
        parameters = training.fetcher.assemble(self.fetched, np.empty(size, np.float32))
        desk.do(RunEvaluation(self.number, parameters, self.buffers.averaged))
