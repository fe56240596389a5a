"""SIGTERM to a server or an agent stops the whole run, in order.

Alone it would take its shard or its daemons with it. When a machine shuts down, every process gets
the signal at the same moment: this way the shards stay until they are saved.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from daemons.loop import Loop
from dlctl import processes, rundb
from dlctl.machine import StopRequested

log = logging.getLogger("dlctl")


def stop_the_run(loop: Loop, directory: Path) -> None:
    """From now on: hand SIGTERM and SIGINT on to the coordinator; end alone if it is gone."""
    wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def asked() -> None:
        os.eventfd_read(wakeup)
        if _signal_coordinator(directory):
            log.warning("told to end: the whole run is stopped, in order")
        else:
            loop.post(StopRequested("told to end, and the coordinator is gone"))

    loop.watch(wakeup, asked)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.eventfd_write(wakeup, 1))


def _signal_coordinator(directory: Path) -> bool:
    """Whether there was a coordinator to signal."""
    run = rundb.read(directory)
    return processes.send_signal(run.get("pid"), run.get("pid_start"), signal.SIGTERM)
