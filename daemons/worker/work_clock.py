"""Measures the work of a worker's threads (`dlctl/records/work_times.py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemons.time_records import WaitMeter
from dlctl.records.work_times import SUM, WorkTimes
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
    """Each kind of work is done in one thread."""

    def __init__(self) -> None:
        self.times: dict[str, WorkTimes] = {}
        """Kind of work -> its times."""
        self._of_thread = threading.local()

    @contextmanager
    def measured(self, effect: Effect | None) -> Iterator[None]:
        """Around the work of an effect of the compute thread; None: work of nobody."""
        kind = OTHER if effect is None else KINDS.get(type(effect), OTHER)
        with self._measuring(kind, effect.count if isinstance(effect, Compute) else 1):
            yield

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Around one sum of a group, in its thread."""
        with self._measuring(SUM, 1):
            yield

    @contextmanager
    def _measuring(self, kind: str, count: int) -> Iterator[None]:
        meter: WaitMeter | None = getattr(self._of_thread, "meter", None)
        if meter is None:
            meter = self._of_thread.meter = WaitMeter()
        wall, waited, cpu = time.perf_counter(), meter.waited_s(), time.thread_time()
        try:
            yield
        finally:
            cpu = time.thread_time() - cpu
            waited = meter.waited_s() - waited
            wall = time.perf_counter() - wall
            self.times.setdefault(kind, WorkTimes()).add(wall, cpu, count, waited)
