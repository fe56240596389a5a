"""Measures the work of a worker's compute thread (`dlctl/records/work_times.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemons.time_records import WaitMeter
from dlctl.records.work_times import WorkTimes
from dlctl.roles.protocol.effects import (
    BuildModel,
    Compute,
    ExchangeOwn,
    NameRows,
    RunEngine,
    RunEvaluation,
    StepAlong,
    TakeComputeState,
)
from dlctl.wire.machine import Effect

KINDS: dict[type[Effect], str] = {
    BuildModel: "build", Compute: "step", NameRows: "rows", RunEngine: "engine",
    StepAlong: "own_step", ExchangeOwn: "exchange", TakeComputeState: "state",
    RunEvaluation: "evaluation",
}  # fmt: skip
OTHER = "other"


class WorkClock:
    """Of one thread, the one that works."""

    def __init__(self) -> None:
        self.times: dict[str, WorkTimes] = {}
        """Kind of work -> its times."""
        self._meter: WaitMeter | None = None

    @contextmanager
    def measured(self, effect: Effect | None) -> Iterator[None]:
        """Around the work of an effect; None: work of nobody."""
        meter = self._meter = self._meter or WaitMeter()
        wall, waited, cpu = time.perf_counter(), meter.waited_s(), time.thread_time()
        try:
            yield
        finally:
            cpu = time.thread_time() - cpu
            waited = meter.waited_s() - waited
            wall = time.perf_counter() - wall
            kind = OTHER if effect is None else KINDS.get(type(effect), OTHER)
            count = effect.count if isinstance(effect, Compute) else 1
            times = self.times.setdefault(kind, WorkTimes())
            times.add(wall, cpu, count, waited)
