"""One evaluation: the run's model and averaged buffers, beside the training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlctl import messages as m
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.roles.worker.fetching import Fetched
from dlctl.roles.worker.joining import buffers_key
from dlctl.roles.worker.training import Training
from dlctl.vector import to_host


@dataclass(slots=True)
class Evaluation:
    number: int
    fetched: Fetched | None
    """The model on its way from the servers; None: the replica's own is evaluated."""
    finish_with: m.Json | None = None
    """Metrics: the task's `finish` is run, with these, and not its `evaluate`."""
    buffers: m.Buffers | None = None
    running: bool = False

    @staticmethod
    def begin(message: m.Evaluate, training: Training, now: float) -> Evaluation:
        number = message.evaluation
        finish_with = dict(message.metrics) if message.finishes else None
        if not training.channels:
            return Evaluation(number, None, finish_with)
        fetched = training.fetcher.start(0, whole=True, average=message.average)
        me, first = training.identity, training.channels[0]
        request = m.FetchBuffers(me.slot, me.epoch, fetched.request)
        training.context.ask(buffers_key(fetched.request), first.peer, request, now)
        return Evaluation(number, fetched, finish_with)

    def advance(self, training: Training, context: Context, now: float) -> None:
        """Run it as soon as everything has come and no gradient is being computed."""
        if self.running or not self._is_here() or not training.pause(now):
            return
        self.running = True
        if self.fetched is None or self.buffers is None:
            parameters = to_host(training.side.parameters).copy()
            averaged = np.array(training.computing.averaged)
        else:
            parameters = training.fetcher.assemble(self.fetched)
            averaged = self.buffers.averaged
        context.do(RunEvaluation(self.number, parameters, averaged, self.finish_with))

    def _is_here(self) -> bool:
        return self.fetched is None or (self.buffers is not None and self.fetched.complete)
