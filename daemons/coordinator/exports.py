"""What takes the run's figures elsewhere, as `[log]` of the job file asks for."""

from __future__ import annotations

import logging
from pathlib import Path

from daemons.coordinator.records import Exporter
from daemons.loop import Loop
from dlctl.config import JobFile
from dlctl.util import extras

log = logging.getLogger("dlctl")


def begin(directory: Path, job: JobFile, loop: Loop) -> list[Exporter]:
    """Whoever started the run was told of a missing package before; without one that has been
    removed since, training goes on.
    """
    found: list[Exporter] = []
    if job.log.tensorboard and _is_there("tensorboard"):
        from daemons.coordinator.tensorboard import TensorBoard

        found.append(TensorBoard(directory))
    if job.log.prometheus_port and _is_there("prometheus"):
        from daemons.coordinator.prometheus import Prometheus

        served = Prometheus(directory.name, job)
        loop.chores.append(served.listen_if_due)
        found.append(served)
    return found


def _is_there(extra: str) -> bool:
    if extras.is_there(extra):
        return True
    log.warning("nothing for %s: its package is gone; %s", extra, extras.how_to_install(extra))
    return False
