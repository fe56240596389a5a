"""How far the run is: steps, samples and loss, when it has finished, when it is to be evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlctl.records.memory import Entry, EvaluationMemory, Fields, Memory, Work
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.roles.protocol.limits import METRIC_NAME_CHARS_MAX
from dlctl.roles.protocol.meters import follow
from dlctl.wire import messages as m
from dlctl.wire.messages import Json

LOSS_WEIGHT = 0.1
"""The weight of the newest portion in the running mean of the loss."""


class RunProgress(Owner):
    PERSISTED = frozenset({"steps", "samples", "loss", "metrics", "evaluated_at"})

    def __init__(self, run: RunState, data: DataSupply, lead: MethodLead) -> None:
        self.run = run
        self.data = data
        self.lead = lead
        self.steps = self.samples = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        """What else the task's loss returns, as running means like that of the loss."""
        self.evaluated_at = 0.0
        """`_evaluation_clock` at the start of the newest evaluation."""
        self._has_own_sizes = any(host.batch_size for host in run.job.places)

    def count(self, done: m.PortionDone) -> None:
        """Count a portion that is done, for the first time."""
        self.steps += done.steps
        self.samples += done.samples
        if done.samples:
            loss = done.loss_sum / done.samples
            mean = loss if self.loss is None else self.loss + LOSS_WEIGHT * (loss - self.loss)
            self.loss = mean if math.isfinite(mean) else self.loss  # It is persisted.
            follow(self.metrics, _means(done), LOSS_WEIGHT)

    # ------------------------------------------------------------ the end

    def enough(self, now: float) -> str:
        """Why the run has finished; "" if it has not."""
        stop = self.run.job.job.stop
        if not self.data.is_open or self.run.released_at is None:
            return ""
        if self.lead.driven is not None:
            if self.lead.driven.over:
                return self.lead.driven.over
        elif self.data.pool.is_finished():
            return f"{self.data.pool.amount_done()} are done"
        if self._counts_steps and stop.steps and self.steps >= stop.steps:
            return f"{self.steps:,} steps are done"
        until = self.deadline()  # Not the difference: at its deadline a run is over, to the bit.
        if until is not None and now >= until:
            return f"{stop.seconds:g} seconds are over"
        if self._counts_samples and stop.samples and self.samples >= stop.samples:
            return f"{self.samples:,} samples are done"
        return ""

    def failed(self) -> str:
        """Why the data or the method ends before the run; "" if the run can continue."""
        return (self.data.pool.failed if self.data.is_open else "") or self.lead.failed()

    def deadline(self) -> float | None:
        seconds, since = self.run.job.job.stop.seconds, self.run.released_at
        return None if seconds is None or since is None else since + seconds

    @property
    def _counts_steps(self) -> bool:
        """Whether the steps of a portion are known only when it is done."""
        return self._has_own_sizes or self.run.job.has_loop or bool(self.data.dataset.clients)

    @property
    def _counts_samples(self) -> bool:
        """The same of its samples."""
        return self.data.dataset.is_own or bool(self.data.dataset.clients)

    # ------------------------------------------------------------ evaluations

    def begin(self) -> None:
        """There are portions from now on: the first evaluation is counted from here."""
        self.evaluated_at = self._evaluation_clock()

    def evaluation_due(self) -> bool:
        """Whether enough steps or epochs have passed since the start of the last evaluation.
        Returns True once per evaluation.
        """
        every = self.run.job.evaluation.every_steps or self.run.job.evaluation.every_epochs
        if not every or not self.data.is_open or self.lead.driven is not None:
            return False
        clock = self._evaluation_clock()
        if clock < self.evaluated_at + every:
            return False
        self.evaluated_at = clock
        return True

    def _evaluation_clock(self) -> float:
        """The clock of evaluations: all workers' steps, or epochs."""
        return self.steps if self.run.job.evaluation.every_steps else self.epochs_done()

    # ------------------------------------------------------------ figures

    def epochs_done(self) -> float:
        return self.data.pool.epochs_done() if self.data.is_open else 0.0

    def fraction(self) -> float | None:
        """Progress of the run by its data, 0..1; None if unknown."""
        if not self.data.is_open or self.lead.driven is not None:
            return None
        stop, parts = self.run.job.job.stop, [self.data.pool.progress()]
        if self._counts_steps and stop.steps:
            parts.append(self.steps / stop.steps)
        if self._counts_samples and stop.samples:
            parts.append(self.samples / stop.samples)
        known = [part for part in parts if part is not None]
        return min(1.0, max(known)) if known else None

    # ------------------------------------------------------------ persisted state

    def restore(self, saved: Json) -> None:
        """Restore steps, samples and loss from a checkpoint's manifest."""
        self.steps, self.samples = saved.get("steps", 0), saved.get("samples", 0)
        self.loss, self.metrics = saved.get("loss"), dict(saved.get("metrics", {}))

    def to_json(self) -> Json:
        """Steps, samples and loss, for a checkpoint's manifest."""
        metrics = {"metrics": dict(self.metrics)} if self.metrics else {}
        return {"steps": self.steps, "samples": self.samples, "loss": self.loss, **metrics}

    def memory(self) -> Iterator[Entry | Fields]:
        yield Fields(Work, {"steps": self.steps, "samples": self.samples, "loss": self.loss})
        yield Fields(EvaluationMemory, {"since": self.evaluated_at})
        yield Entry("metrics", dict(self.metrics))

    def recall(self, memory: Memory, now: float) -> None:
        work = memory.work
        self.steps, self.samples, self.loss = work.steps, work.samples, work.loss
        self.metrics = dict(memory.value("metrics", {}))
        self.evaluated_at = (memory.piece(EvaluationMemory) or EvaluationMemory()).since


def _means(done: m.PortionDone) -> dict[str, float]:
    """The means of a portion's metrics besides the loss; implausible reports are left out."""
    found = {}
    for name, sums in done.metric_sums.items():
        match sums:
            case [float(total), int(samples)] if 0 < samples <= done.samples:
                found[name[:METRIC_NAME_CHARS_MAX]] = total / samples
    return found
