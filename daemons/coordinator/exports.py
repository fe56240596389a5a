"""The exporters of the run's metrics that `[log]` of the job file enables."""

from __future__ import annotations

import logging
from pathlib import Path

from daemons.coordinator.records import Exporter
from daemons.loop import Loop
from dlctl.config import JobFile

log = logging.getLogger("dlctl")


def begin(directory: Path, job: JobFile, loop: Loop) -> list[Exporter]:
    """Start the exporters. `dlctl start` has already refused a missing package; if it was removed
    since, training continues without the exporter.
    """
    found: list[Exporter] = []
    try:
        if job.log.tensorboard:
            from daemons.coordinator.tensorboard import TensorBoard

            found.append(TensorBoard(directory))
        if job.log.prometheus_port:
            from daemons.coordinator.prometheus import Prometheus

            served = Prometheus(directory.name, job)
            loop.chores.append(served.listen_if_due)
            found.append(served)
    except ImportError as error:
        log.warning("metrics are not exported: %s; training continues", error)
    return found
