"""How long a step and an evaluation take on this machine: real ones of the user's task."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daemons.time_records import WaitMeter
from daemons.worker.building import build
from dlctl.job.config import JobFile
from dlctl.records.work_times import WorkTimes

STEPS = 30
STEPS_S = 2.0
"""It measures until it has that many steps or that many seconds, at least `STEPS_MIN`."""
STEPS_MIN = 3


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Seconds of this process, with the threads of one worker, less what it waited for a core."""

    step_s: float
    """The median."""
    core_share: float
    """The part of the steps for which a core is needed."""
    evaluation_s: float
    build_s: float


@dataclass(frozen=True, slots=True)
class TaskFacts:
    samples: int
    """Of a data epoch; 0: a stream."""
    parameters: int
    """Trained ones."""


def measure(job: JobFile, directory: Path) -> tuple[MeasuredTimes, TaskFacts]:
    """Measure a replica of its own. Raises TaskError."""
    watch = _Watch()
    built = build(job, 0, 0, directory)
    build_s = watch.lap().alone_s
    stepper, loader = built.stepper, built.loader
    size = job.workers.batch_size
    batch = (size if isinstance(size, int) else 1) * job.gradient.accumulate
    portion = batch * max(1, STEPS + 1)
    stop = min(portion, built.samples or portion)
    steps: list[float] = []
    whole = WorkTimes()
    for number in range(max(1, stop // batch)):
        watch = _Watch()
        loaded = loader.step(0, 0, stop, number, 0 if not built.samples else -1)
        stepper.step(loaded.batches, own_lr=None, gather=True, samples=loaded.samples)
        took = watch.lap()
        steps.append(took.alone_s)
        if number:  # The first one allocates.
            whole = WorkTimes.together([whole, took])
        if len(steps) > STEPS_MIN and sum(steps) > STEPS_S:
            break
    loader.close()
    steps = steps[1:] or steps
    replica = stepper.replica
    evaluation_s = 0.0
    if replica.task.has("evaluate"):
        watch = _Watch()
        replica.evaluate(np.array(replica.parameters), replica.averaged())
        evaluation_s = watch.lap().alone_s
    times = MeasuredTimes(statistics.median(steps), whole.core_share, evaluation_s, build_s)
    return times, TaskFacts(built.samples, len(replica.parameters))


class _Watch:
    """Runs from its creation."""

    def __init__(self) -> None:
        self._meter = WaitMeter()
        self._began = self._now()

    def lap(self) -> WorkTimes:
        wall_s, cpu_s, waited_s = (b - a for a, b in zip(self._began, self._now(), strict=True))
        times = WorkTimes()
        times.add(wall_s, cpu_s, waited_s=waited_s)
        return times

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), self._meter.waited_s()
