"""How long a step and an evaluation take on this machine: real ones of the user's task."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daemons.worker.building import build
from dlctl.job.config import JobFile

STEPS = 30
STEPS_S = 2.0
"""It measures until it has that many steps or that many seconds, at least `STEPS_MIN`."""
STEPS_MIN = 3


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Seconds of this process, with the threads of one worker."""

    step_s: float
    """The median."""
    evaluation_s: float
    build_s: float


def measure(job: JobFile, directory: Path) -> tuple[MeasuredTimes, int]:
    """Measure a replica of its own. Also returns the samples of a data epoch; 0: a stream. Raises
    TaskError.
    """
    began = time.perf_counter()
    built = build(job, 0, 0, directory)
    build_s = time.perf_counter() - began
    stepper, loader = built.stepper, built.loader
    size = job.workers.batch_size
    batch = (size if isinstance(size, int) else 1) * job.gradient.accumulate
    portion = batch * max(1, STEPS + 1)
    stop = min(portion, built.samples or portion)
    steps: list[float] = []
    for number in range(max(1, stop // batch)):
        began = time.perf_counter()
        loaded = loader.step(0, 0, stop, number, 0 if not built.samples else -1)
        stepper.step(loaded.batches, own_lr=None, gather=True, samples=loaded.samples)
        steps.append(time.perf_counter() - began)
        if len(steps) > STEPS_MIN and sum(steps) > STEPS_S:
            break
    loader.close()
    steps = steps[1:] or steps  # The first one allocates.
    replica = stepper.replica
    evaluation_s = 0.0
    if replica.task.has("evaluate"):
        began = time.perf_counter()
        replica.evaluate(np.array(replica.parameters), replica.averaged())
        evaluation_s = time.perf_counter() - began
    times = MeasuredTimes(statistics.median(steps), evaluation_s, build_s)
    return times, built.samples
