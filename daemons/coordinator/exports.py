"""The exporters of the run's metrics that `[log]` of the job file enables."""

from __future__ import annotations

import logging
from pathlib import Path

from daemons.coordinator.records import Exporter
from daemons.coordinator.trackers import Trackers
from daemons.loop import Loop
from dlctl.job.config import JobFile
from dlctl.runs.database import RunDb
from dlctl.util import extras

log = logging.getLogger("dlctl")


def begin(directory: Path, job: JobFile, loop: Loop, db: RunDb) -> list[Exporter]:
    """Start the exporters. `dlctl start` has already refused a missing package; if it was removed
    since, training continues without the exporter.
    """
    found: list[Exporter] = []
    if job.log.tensorboard and _is_there("tensorboard"):
        from daemons.coordinator.tensorboard import TensorBoard

        found.append(TensorBoard(directory))
    if job.log.prometheus_port and _is_there("prometheus"):
        from daemons.coordinator.prometheus import Prometheus

        found.append(Prometheus(directory.name, job))
    chosen = {"wandb": job.log.wandb != "off", "mlflow": bool(job.log.mlflow)}
    if names := [name for name, is_chosen in chosen.items() if is_chosen and _is_there(name)]:
        found.append(Trackers(directory, names, loop.post, db))
    return found


def _is_there(extra: str) -> bool:
    if extras.is_there(extra):
        return True
    log.warning("no export to %s: its package is missing; %s", extra, extras.how_to_install(extra))
    return False
