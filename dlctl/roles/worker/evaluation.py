"""Evaluations of the run's model and averaged buffers, concurrent with the training: one at a time.

A repeated request gets the stored answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from dlctl.model.vector import to_host
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import BringRows, EvaluationRun, RunEvaluation
from dlctl.roles.worker.fetching import Fetched
from dlctl.roles.worker.interface import Evaluable
from dlctl.roles.worker.joining import buffers_key
from dlctl.roles.worker.services.asking import MODEL, NO_MODEL
from dlctl.wire import messages as m
from dlctl.wire.messages import Array

ANSWER_S = 60.0
"""Timeout for the models of the other replicas; the mean is over those that arrived."""


class ModelMean:
    """Mean of the models of all replicas, accumulated in float64."""

    def __init__(self, replica: Evaluable, now: float) -> None:
        asking = replica.asking
        self._sum = np.zeros(len(replica.side.parameters), np.float64)
        self._squares, self.models = 0.0, 0
        # Drained replicas included; a joining one answers that it has no model.
        self._waits_for = {*asking.members.known} - {replica.links.identity.slot}
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
        """float32[d], the mean of the models."""
        return (self._sum / self.models).astype(np.float32)

    def figures(self) -> m.Json:
        """The number of models, and their root mean square distance from the mean."""
        mean = self._sum / self.models
        square = max(0.0, self._squares / self.models - float(np.dot(mean, mean)))
        return {"consensus_distance": math.sqrt(square), "replicas": float(self.models)}


@dataclass(slots=True)
class RunningEvaluation:
    """The evaluation that this worker runs now."""

    number: int
    fetched: Fetched | None
    """The model fetched from the servers; None: the replica's own is evaluated, or the mean."""
    finish_with: m.Json | None = None
    """Metrics: the task's `finish` is run with these instead of its `evaluate`."""
    mean: ModelMean | None = None
    """Over all replicas, if that is the run's model."""
    buffers: m.Buffers | None = None
    running: bool = False
    rows: Fetched | None = None
    """Rows that the task waits for."""

    def has_arrived(self) -> bool:
        if self.mean is not None:
            return self.mean.is_here()
        return self.fetched is None or (self.buffers is not None and self.fetched.complete)


class WorkerEvaluations:
    def __init__(self, context: Context, name: str, *, of_all: bool) -> None:
        """name: of this daemon. of_all: the run's model is the mean of all replicas."""
        self._context = context
        self._name = name
        self._of_all = of_all
        self._current: RunningEvaluation | None = None
        self._answer: m.Evaluated | None = None
        """The last answer, in case it was lost."""

    def on_evaluate(self, message: m.Evaluate, replica: Evaluable, now: float) -> None:
        if self._answer is not None and self._answer.evaluation == message.evaluation:
            self._context.send(COORDINATOR, self._answer)
        elif not replica.has_model():
            if replica.parked:  # Else the coordinator retries.
                none = m.Evaluated(message.evaluation, self._name, {}, NO_MODEL)
                self._context.send(COORDINATOR, none)
        elif self._current is None:
            self._current = self._begun(message, replica, now)

    def _begun(self, message: m.Evaluate, replica: Evaluable, now: float) -> RunningEvaluation:
        number, links = message.evaluation, replica.links
        finish_with = dict(message.metrics) if message.finishes else None
        if not links.channels:
            mean = ModelMean(replica, now) if self._of_all else None
            return RunningEvaluation(number, None, finish_with, mean)
        fetched = replica.fetcher.start(0, whole=True, average=message.average)
        me, first = links.identity, links.channels[0]
        request = m.FetchBuffers(me.slot, me.term, fetched.request)
        links.context.ask(buffers_key(fetched.request), first.peer, request, now)
        return RunningEvaluation(number, fetched, finish_with)

    def on_buffers(self, message: m.Buffers) -> None:
        """Receive the servers' averaged buffers, which were requested."""
        if self._current is not None:
            self._current.buffers = message

    def want(self, rows: Array, replica: Evaluable) -> None:
        """The running task requests rows of the tables of rows."""
        if self._current is None:
            return
        tables = replica.links.tables
        number = next(n for n, table in enumerate(tables) if table[0].rows is not None)
        self._current.rows = replica.fetcher.start(0, table=number, whole=True, rows=rows)

    def advance(self, replica: Evaluable, now: float) -> None:
        """Run it as soon as everything has arrived and no gradient is being computed."""
        current = self._current
        if current is None:
            return
        if current.rows is not None and current.rows.complete:
            self._context.do(BringRows(replica.fetcher.assemble(current.rows, None)))
            current.rows = None
        if current.running or not current.has_arrived() or not replica.pause(now):
            return
        current.running = True
        averaged = np.array(replica.averaged)
        if current.mean is not None:
            current.mean.add(to_host(replica.side.parameters))
            parameters = current.mean.value()
        elif current.fetched is None or current.buffers is None:
            parameters = to_host(replica.side.parameters).copy()
        else:
            parameters = replica.fetcher.assemble(current.fetched, replica.side.parameters)
            averaged = current.buffers.averaged
        effect = RunEvaluation(current.number, parameters, averaged, current.finish_with)
        self._context.do(effect)

    def on_run(self, run: EvaluationRun, replica: Evaluable) -> None:
        more, self._current = self._current, None
        replica.resume()
        mean = more.mean if more is not None and run.metrics else None
        self._answer = m.Evaluated(
            run.evaluation, self._name, run.metrics, run.error, run.text,
            {} if mean is None else mean.figures(),
        )  # fmt: skip
        self._context.send(COORDINATOR, self._answer)
