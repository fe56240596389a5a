"""One plain torch process, or torch's DDP, in virtual time: the rows beside the methods."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from daemons.plain.loop import Plain, evaluated, step_on, write
from daemons.simulator.costs import Costs, Duration
from daemons.simulator.sums import RING_CPU_S, ring_s
from daemons.worker.building import Built, build
from dlctl.job.config import JobFile
from dlctl.roles.protocol.effects import Compute, RunEvaluation
from dlctl.sim.cores import Cores, SimThread
from dlctl.sim.request import SimulationRequest
from dlctl.sim.timeline import Timeline
from dlctl.wire.messages import Json

VALUE_BYTES = 4
STEP = Compute(0, 0, 1, 0)
EVALUATION = RunEvaluation(0, np.zeros(0, np.float32), np.zeros(0))
"""What the durations are those of."""


class VirtualEngine:
    """All ranks in one process: a step of all is a step along the mean of their gradients."""

    def __init__(self, built: Built, costs: Costs, request: SimulationRequest, ranks: int) -> None:
        self.built, self.costs, self.request, self.ranks = built, costs, request, ranks
        self._timeline = Timeline()
        self._nbytes = len(built.stepper.replica.parameters) * VALUE_BYTES
        # With a link each rank has a machine of its own.
        machines = [Cores(self._timeline, request.cores) for _ in range(ranks)]
        places = machines if request.link is not None else machines[:1] * ranks
        self._threads = [SimThread(partial(_same, cores), lambda: True) for cores in places]

    def now(self) -> float:
        return self._timeline.now

    def step(self, epoch: int, first: int, stop: int, lr: float) -> float:
        loss = step_on(self.built, epoch, range(first, stop), lr)
        self._pass([self.costs.of(rank, STEP) for rank in range(self.ranks)])
        if self.ranks > 1:
            takes_s = ring_s(self._nbytes, self.ranks, self.request.link)
            self._pass([Duration(RING_CPU_S, takes_s)] * self.ranks)
        return loss

    def evaluate(self) -> Mapping[str, float]:
        self._pass([self.costs.of(0, EVALUATION)])
        return evaluated(self.built)

    def agreed(self, reason: str) -> str:
        return reason

    def _pass(self, takes: list[Duration]) -> None:
        """Let all ranks work, until the last one is done."""
        left = len(takes)

        def done() -> None:
            nonlocal left
            left -= 1

        for thread, each in zip(self._threads, takes, strict=False):
            thread.run(each.cpu_s, done, sleeps_s=each.sleeps_s)
        while left and self._timeline.step(float("inf")):
            pass


def _same(cores: Cores) -> Cores:
    return cores


def train(request: SimulationRequest, directory: Path, job: JobFile, costs: Costs) -> Json:
    """Train, and fill the run directory."""
    began = time.perf_counter()
    built = build(job, 0, 0, directory)
    ranks = job.workers.count
    engine = VirtualEngine(built, costs, request, ranks)
    sent = 2 * (ranks - 1) * len(built.stepper.replica.parameters) * VALUE_BYTES
    course = Plain(job, built, 0, ranks).run(engine, sent)
    built.loader.close()
    mark: Json = {
        "seed": request.seed, "step_s": request.step_s, "real_s": time.perf_counter() - began
    }  # fmt: skip
    began_at = float(int(time.time() - course.ended_at))
    write(directory, course, began_at, began_at, {"simulated": mark})
    return {"simulated": mark}
