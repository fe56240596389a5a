"""One evaluation of the run's model and averaged buffers, concurrent with the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from dlctl import messages as m
from dlctl.messages import Array
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import BringRows, RunEvaluation
from dlctl.roles.worker.fetching import Fetched
from dlctl.roles.worker.joining import buffers_key
from dlctl.roles.worker.services.asking import MODEL
from dlctl.roles.worker.training import Training
from dlctl.vector import to_host

ANSWER_S = 60.0
"""Timeout for the models of the other replicas; the mean is over those that arrived."""


class Mean:
    """Mean of the models of all replicas, accumulated in float64."""

    def __init__(self, training: Training, now: float) -> None:
        asking = training.asking
        self._sum = np.zeros(len(training.side.parameters), np.float64)
        self._squares, self.models = 0.0, 0
        # Drained replicas included; a joining one answers that it has no model.
        self._waits_for = {*asking.members.known} - {training.identity.slot}
        for slot in sorted(self._waits_for):
            asking.ask(slot, MODEL, (), now + ANSWER_S, partial(self._on_model, slot), now)

    def _on_model(self, slot: int, arrays: tuple[Array, ...] | None) -> None:
        self._waits_for.discard(slot)
        if arrays and arrays[0].size == self._sum.size:
            self.add(arrays[0])

    def add(self, parameters: Array) -> None:
        model = parameters.astype(np.float64)
        self._sum += model
        self._squares += float(np.dot(model, model))
        self.models += 1

    def is_here(self) -> bool:
        return not self._waits_for

    def value(self) -> Array:
        """float32[d]"""
        return (self._sum / self.models).astype(np.float32)

    def figures(self) -> m.Json:
        """Their number, and their root mean square distance from it."""
        mean = self._sum / self.models
        square = max(0.0, self._squares / self.models - float(np.dot(mean, mean)))
        return {"consensus_distance": math.sqrt(square), "replicas": float(self.models)}


@dataclass(slots=True)
class Evaluation:
    number: int
    fetched: Fetched | None
    """The model fetched from the servers; None: the replica's own is evaluated, or the mean."""
    finish_with: m.Json | None = None
    """Metrics: the task's `finish` is run with these instead of its `evaluate`."""
    mean: Mean | None = None
    """Over all replicas, if that is the run's model."""
    buffers: m.Buffers | None = None
    running: bool = False
    rows: Fetched | None = None
    """Rows that the task waits for."""

    def want(self, rows: Array, training: Training) -> None:
        """The running task requests rows of the tables of rows."""
        number = next(n for n, table in enumerate(training.tables) if table[0].rows is not None)
        self.rows = training.fetcher.start(0, table=number, whole=True, rows=rows)

    @staticmethod
    def begin(
        message: m.Evaluate, training: Training, now: float, *, is_of_all: bool = False
    ) -> Evaluation:
        """is_of_all: the model is the mean of all replicas."""
        number = message.evaluation
        finish_with = dict(message.metrics) if message.finishes else None
        if not training.channels:
            mean = Mean(training, now) if is_of_all else None
            return Evaluation(number, None, finish_with, mean)
        fetched = training.fetcher.start(0, whole=True, average=message.average)
        me, first = training.identity, training.channels[0]
        request = m.FetchBuffers(me.slot, me.epoch, fetched.request)
        training.context.ask(buffers_key(fetched.request), first.peer, request, now)
        return Evaluation(number, fetched, finish_with)

    def advance(self, training: Training, context: Context, now: float) -> None:
        """Run it as soon as everything has arrived and no gradient is being computed."""
        if self.rows is not None and self.rows.complete:
            context.do(BringRows(training.fetcher.assemble(self.rows, None)))
            self.rows = None
        if self.running or not self._has_arrived() or not training.pause(now):
            return
        self.running = True
        averaged = np.array(training.computing.averaged)
        if self.mean is not None:
            self.mean.add(to_host(training.side.parameters))
            parameters = self.mean.value()
        elif self.fetched is None or self.buffers is None:
            parameters = to_host(training.side.parameters).copy()
        else:
            parameters = training.fetcher.assemble(self.fetched, training.side.parameters)
            averaged = self.buffers.averaged
        context.do(RunEvaluation(self.number, parameters, averaged, self.finish_with))

    def _has_arrived(self) -> bool:
        if self.mean is not None:
            return self.mean.is_here()
        return self.fetched is None or (self.buffers is not None and self.fetched.complete)
