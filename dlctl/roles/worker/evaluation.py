"""One evaluation: the servers' parameters and averaged buffers, beside the training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl import messages as m
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.roles.worker.fetching import Fetched
from dlctl.roles.worker.joining import buffers_key
from dlctl.roles.worker.training import Training


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
        training.context.ask(buffers_key(fetched.request), first.peer, request, now)
        return Evaluation(number, fetched)

    def advance(self, training: Training, context: Context, now: float) -> None:
        """Run it as soon as everything has come and no gradient is being computed."""
        if self.running or self.buffers is None or not self.fetched.complete:
            return
        if not training.pause(now):
            return
        self.running = True
        size = training.channels[-1].hi
        parameters = training.fetcher.assemble(self.fetched, np.empty(size, np.float32))
        context.do(RunEvaluation(self.number, parameters, self.buffers.averaged))
