"""Workers that compute nothing, for `dlctl simulate --protocol`: only their time passes.

The vectors of such a run are short stand-ins, and its messages count as many bytes as if they were
those of the model. The data never ends.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from daemons.simulator.compute import WorkQueue
from daemons.simulator.costs import Costs
from daemons.simulator.generators import Generators
from daemons.worker.compute_thread import Work
from dlctl.roles.protocol.effects import (
    BuffersLoaded,
    BuildModel,
    Compute,
    Computed,
    ComputeStateTaken,
    EngineRan,
    EvaluationRun,
    ExchangeOwn,
    LoadBuffers,
    LocateTask,
    ModelBuilt,
    RestoreComputeState,
    RunEvaluation,
    Settled,
    StepAlong,
    TakeComputeState,
    TaskLocated,
)
from dlctl.sim.arrays import FilesDriver
from dlctl.sim.handling import Handling
from dlctl.sim.objectives import layout_of
from dlctl.sim.process import Process
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array, ModelReady

SAMPLES = 1 << 40
"""Of a data epoch."""
CHANGE = np.float32(1e-6)
"""Of each parameter, at most, by each step."""


def _gradient(size: int, slot: int) -> Array:
    """float32[size]: the largest elements are anywhere, and elsewhere for each worker."""
    return CHANGE * np.random.default_rng(slot).random(size, np.float32)


class NoTraining:
    """Makes workers' processes perform the effects that compute (`world.Computes`).

    size: of the stand-in for the model's vector.
    """

    def __init__(self, size: int, costs: Costs, handling: Handling) -> None:
        self._size = size
        self._costs = costs
        self._handling = handling
        self._generators = Generators()
        self.steps = 0
        """Of all workers so far."""
        self.trained: set[str] = set()
        """Workers that have made a step."""

    def __call__(self, process: Process, files: FilesDriver) -> None:
        slot = int(process.name.rpartition("-")[2])
        work = WorkQueue(process, slot, self._costs, self._generators, self._handling)
        thread = _Thread(_gradient(self._size, slot))
        compute = thread.effects[Compute]

        def count(effect: Compute) -> Event | None:
            self.steps += effect.count
            self.trained.add(process.name)
            return compute(effect)

        thread.effects[Compute] = count
        for kind, how in thread.effects.items():
            work.perform(kind, partial(thread.put, how), anywhere=True)
        work.next_work = thread.queue.get
        process.perform(Settled, lambda _: None)
        process.perform(LocateTask, lambda _: process.post(TaskLocated("")))


class _Thread:
    """What a compute thread answers, without computing it."""

    def __init__(self, gradient: Array) -> None:
        self.queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.parameters: Array = np.zeros_like(gradient)
        self._gradient = gradient
        self._norm = float(np.linalg.norm(gradient))
        self._averaged: Array = np.zeros(0)
        self.effects: dict[type[Effect], Callable[[Any], Event | None]] = {
            BuildModel: self._build,
            LoadBuffers: lambda _: BuffersLoaded(),
            Compute: self._compute,
            StepAlong: lambda _: EngineRan(()),
            ExchangeOwn: lambda _: EngineRan((np.zeros(0, np.float32),)),
            TakeComputeState: lambda _: ComputeStateTaken({}),
            RestoreComputeState: lambda _: None,
            RunEvaluation: lambda effect: EvaluationRun(effect.evaluation, {}),
        }

    def put(self, how: Callable[[Any], Event | None], effect: Effect) -> None:
        self.queue.put((effect, partial(how, effect)))

    def _build(self, _: BuildModel) -> ModelBuilt:
        layout = layout_of(len(self.parameters)).to_bytes()
        return ModelBuilt(ModelReady("", layout, SAMPLES), self.parameters, self._averaged, None)

    def _compute(self, effect: Compute) -> Computed:
        if effect.own_lr is not None:
            self.parameters -= effect.count * CHANGE
        gradient = self._gradient if effect.gather else None
        before = (1.0,) * (effect.count - 1)
        return Computed(1.0, gradient, self._averaged, self._norm, is_usable=True, before=before)
