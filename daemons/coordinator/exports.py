"""The exporters of the run's metrics that `[log]` of the job file enables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from daemons.coordinator.records import Exporter
from daemons.loop import Loop
from dlctl.config import JobFile
from dlctl.messages import Json
from dlctl.util import extras

log = logging.getLogger("dlctl")


class Guarded:
    """Disables an exporter that fails, so that it never ends the run."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter: Exporter | None = exporter

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        self._do(lambda exporter: exporter.add_row(at, name, step, values))

    def take_snapshot(self, run: Json, daemons: Sequence[Json]) -> None:
        self._do(lambda exporter: exporter.take_snapshot(run, daemons))

    def close(self) -> None:
        self._do(lambda exporter: exporter.close())

    def _do(self, what: Callable[[Exporter], None]) -> None:
        if self._exporter is None:
            return
        try:
            what(self._exporter)
        except Exception:  # Libraries raise anything.
            log.exception("%s has failed; training continues", type(self._exporter).__name__)
            self._exporter = None


def begin(directory: Path, job: JobFile, loop: Loop) -> list[Exporter]:
    """Start the exporters. `dlctl start` has already refused a missing package; if it was removed
    since, training continues without the exporter.
    """
    found: list[Exporter] = []
    if job.log.tensorboard and _is_there("tensorboard"):
        from daemons.coordinator.tensorboard import TensorBoard

        found.append(Guarded(TensorBoard(directory)))
    if job.log.prometheus_port and _is_there("prometheus"):
        from daemons.coordinator.prometheus import Prometheus

        served = Prometheus(directory.name, job)
        loop.chores.append(served.listen_if_due)
        found.append(Guarded(served))
    return found


def _is_there(extra: str) -> bool:
    if extras.is_there(extra):
        return True
    log.warning("no export to %s: its package is missing; %s", extra, extras.how_to_install(extra))
    return False
