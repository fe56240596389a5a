"""The training loop that a user would write: batches of a shuffled epoch, a step, an evaluation.

Rank r of n takes every n-th batch of an epoch. The counts are as in a run of dlctl: a step of n
ranks is n steps, each of a batch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from daemons.worker.building import Built
from dlctl.job.config import JobFile
from dlctl.records.best import Target
from dlctl.records.series import EVALUATION, RUN
from dlctl.runs.database import RunDb
from dlctl.wire.messages import Json

KEPT = 0.98
"""Weight of the past in the running mean of the loss, as of the samples of 50 batches."""


AGREED_STEPS = 32
"""Steps of all ranks between two questions whether a limit that only one rank knows is reached."""


class PlainEngine(Protocol):
    """Makes the steps, and knows the time."""

    def now(self) -> float:
        """Seconds."""
        ...

    def step(self, epoch: int, first: int, stop: int, lr: float) -> float:
        """One step of all ranks, of the batches [first, stop) of an epoch. Returns the mean loss of
        this rank.
        """
        ...

    def evaluate(self) -> Mapping[str, float]: ...

    def agreed(self, reason: str) -> str:
        """What rank 0 says; all ranks ask at the same time."""
        ...


@dataclass(slots=True)
class Course:
    """What is recorded of a run."""

    ready_at: float = 0.0
    """By `PlainEngine.now`, as the other times."""
    ended_at: float = 0.0
    step: int = 0
    samples: int = 0
    nbytes: int = 0
    """Sent and received for the sums of gradients, by all ranks."""
    loss: float | None = None
    reason: str = ""
    evaluations: list[tuple[float, int, Json]] = field(default_factory=list)
    rows: list[tuple[float, int, Json]] = field(default_factory=list)
    """(time, step, values) of the series of the run."""


class Plain:
    """One training, as one rank sees it."""

    def __init__(self, job: JobFile, built: Built, rank: int, ranks: int) -> None:
        self.job, self.built, self.rank, self.ranks = job, built, rank, ranks
        self.course = Course()
        size = job.workers.batch_size
        self.batch = (size if isinstance(size, int) else 1) * job.gradient.accumulate
        # A rank cannot sit out a sum: what is left of an epoch is too little for all ranks.
        batches = math.ceil(built.samples / self.batch)
        self.batches = max(1, batches // ranks) * ranks
        target = job.job.stop.target
        self._target = None if not target else Target.parse(target)
        self._lr = float(job.inner.options.get("lr", 0.0))
        self._evaluations = 0

    def run(self, engine: PlainEngine, step_bytes: int) -> Course:
        """Until the job's stop. step_bytes: sent by all ranks together in each step."""
        course, epoch = self.course, 0
        course.ready_at = engine.now()
        while not course.reason:
            for first in range(0, self.batches, self.ranks):
                self._step(engine, epoch, first, step_bytes)
                if course.reason:
                    break
            epoch += 1
        self._evaluate(engine)
        course.ended_at = engine.now()
        self._record(engine)
        return course

    def _step(self, engine: PlainEngine, epoch: int, first: int, nbytes: int) -> None:
        course, stop = self.course, first + self.ranks
        loss = engine.step(epoch, first, min(stop, self.batches), self._lr)
        total = self.built.samples
        course.samples += min(stop * self.batch, total) - min(first * self.batch, total)
        course.step += self.ranks
        course.nbytes += nbytes
        before = course.loss
        course.loss = loss if before is None else KEPT * before + (1 - KEPT) * loss
        course.reason = self._limit()
        is_due = self._is_evaluation_due()
        if is_due:
            self._evaluate(engine)
        if not course.reason and (is_due or course.step // self.ranks % AGREED_STEPS == 0):
            course.reason = engine.agreed(self._own_limit(engine))

    def _limit(self) -> str:
        """The limit that is reached, of those that every rank knows; "" if none is."""
        stop, course = self.job.job.stop, self.course
        if stop.epochs is not None and course.samples >= stop.epochs * self.built.samples:
            return f"{stop.epochs:g} epochs are done"
        if stop.steps is not None and course.step >= stop.steps:
            return f"{stop.steps:,} steps are done"
        if stop.samples is not None and course.samples >= stop.samples:
            return f"{stop.samples:,} samples are done"
        return ""

    def _own_limit(self, engine: PlainEngine) -> str:
        seconds, course = self.job.job.stop.seconds, self.course
        if seconds is not None and engine.now() - course.ready_at >= seconds:
            return f"{seconds:g} seconds are over"
        if course.evaluations and self._target is not None:
            metrics = course.evaluations[-1][2]["metrics"]
            if self._target.is_reached(metrics):
                return f"{self._target} is reached"
        return ""

    def _is_evaluation_due(self) -> bool:
        options, course = self.job.evaluation, self.course
        if options.every_steps:
            done = course.step / options.every_steps
        elif options.every_epochs:
            done = course.samples / (self.built.samples * options.every_epochs)
        else:
            return False
        before, self._evaluations = self._evaluations, int(done)
        return self._evaluations > before

    def _evaluate(self, engine: PlainEngine) -> None:
        if self.rank == 0:
            self._record(engine)  # Costs at an evaluation are those between two rows.
            metrics = dict(engine.evaluate())
            self.course.evaluations.append((engine.now(), self.course.step, {"metrics": metrics}))
            self._record(engine)

    def _record(self, engine: PlainEngine) -> None:
        course, now = self.course, engine.now()
        values = {
            "samples": course.samples, "push_bytes": course.nbytes, "fetch_bytes": 0,
            "loss": course.loss, "seconds": now - course.ready_at,
        }  # fmt: skip
        course.rows.append((now, course.step, values))


def step_on(built: Built, epoch: int, numbers: range, lr: float) -> float:
    """One step of the replica's own optimiser along the mean of the gradients of some batches of an
    epoch. Returns the mean loss. Raises TaskError.
    """
    batches: list[tuple[Any, float]] = []
    samples = 0
    for number in numbers:
        found = built.loader.step(epoch, 0, built.samples, number)
        batches += [(batch, share / len(numbers)) for batch, share in found.batches]
        samples += found.samples
    stepped = built.stepper.step(batches, own_lr=lr, gather=False, samples=samples, epoch=epoch)
    return float(stepped.loss)


def evaluated(built: Built) -> Mapping[str, float]:
    """The task's metrics of the replica as it is. Raises TaskError."""
    replica = built.stepper.replica
    found: Mapping[str, float] = replica.evaluate(np.array(replica.parameters), replica.averaged())
    return found


def write(directory: Path, course: Course, began_at: float, offset_s: float, more: Json) -> None:
    """Put a training on record, as a run. began_at: when it was started, in seconds since 1970.
    offset_s: from the engine's clock to those. more: for the row of the run.
    """
    with closing(RunDb(directory)) as db:
        last = course.evaluations[-1][2]["metrics"] if course.evaluations else {}
        db.put_run(
            state="finished", reason=course.reason, pid=None, pid_start=None, started_at=began_at,
            ready_at=course.ready_at + offset_s, ended_at=course.ended_at + offset_s,
            step=course.step, samples=course.samples, loss=course.loss,
            evaluation={"metrics": last, "step": course.step},
            totals={"push_bytes": course.nbytes, "fetch_bytes": 0, "pushes": 0}, **more,
        )  # fmt: skip
        for series, rows in ((RUN, course.rows), (EVALUATION, course.evaluations)):
            for at, step, values in rows:
                db.add_metric(at + offset_s, series, step, values)
        db.commit()
