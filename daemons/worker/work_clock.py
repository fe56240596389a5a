"""Measures the work of a worker's compute thread, and records it (`records/work_times.py`).

A piece of work costs four clock reads, about a microsecond. The file is written now and then, and
at the end; nothing depends on it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlctl.records.work_times import FOLDER, SCHEMA, WorkTimes
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
from dlctl.util import cores, regular
from dlctl.util.fsync import replacing
from dlctl.wire.machine import Effect
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
WRITE_EVERY_S = 15.0
KINDS: dict[type[Effect], str] = {
    BuildModel: "build", Compute: "step", NameRows: "rows", RunEngine: "engine",
    StepAlong: "own_step", ExchangeOwn: "exchange", TakeComputeState: "state",
    RunEvaluation: "evaluation",
}  # fmt: skip
OTHER = "other"


class WorkClock:
    def __init__(self, directory: Path, name: str, incarnation: int) -> None:
        """directory: the run's, or that of this host."""
        self._path = directory / FOLDER / f"{name}.{incarnation}.json"
        self._times: dict[str, WorkTimes] = {}
        self._due_at = time.monotonic() + WRITE_EVERY_S
        self._is_broken = False

    @contextmanager
    def measured(self, effect: Effect | None) -> Iterator[None]:
        """Around the work of an effect; None: work of nobody."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            kind = OTHER if effect is None else KINDS.get(type(effect), OTHER)
            count = effect.count if isinstance(effect, Compute) else 1
            times = self._times.setdefault(kind, WorkTimes())
            times.add(time.perf_counter() - wall, time.process_time() - cpu, count)

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + WRITE_EVERY_S
            self.write()

    def write(self) -> None:
        """A disk that cannot take it is no reason to stop; one warning is logged."""
        values: Json = {
            "schema": SCHEMA,
            "cores": cores.usable(),
            "waited_s": waited_s(),
            "work": {kind: times.to_json() for kind, times in self._times.copy().items()},
        }
        try:
            self._path.parent.mkdir(exist_ok=True)
            # The loop writes it, which must not wait for a busy disk.
            with replacing(self._path, syncs=False) as file:
                file.write(json.dumps(values).encode())
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                log.warning(
                    "cannot record how long work takes (%s): %s", self._path, error.strerror
                )


def waited_s() -> float:
    """How long the living threads of this process were ready to run and had no core, all together.
    0 on a kernel that does not count it.
    """
    found = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in Path("/proc/self/task").iterdir():
            found += int(regular.read_bytes(thread / "schedstat").split()[1])
    return found / 1e9
