"""SIGTERM to a server or an agent stops the whole run, in order.

Alone it would take its shard or its daemons with it. When a machine shuts down, every process gets
the signal at the same moment: this way the shards stay until they are saved.

On another machine than the coordinator's it ends that daemon alone, as an accident would: an agent
with the daemons of its host, a server with its shard as it is. The coordinator starts it again, or
goes on without that host.
"""

from __future__ import annotations

import logging
import signal
import sqlite3
from pathlib import Path

from daemons.loop import Loop, Signals
from daemons.process import DaemonContext
from dlctl.errors import DlctlError
from dlctl.machine import StopRequested
from dlctl.runs import database
from dlctl.util import processes

log = logging.getLogger("dlctl")


def stop_the_run(loop: Loop, context: DaemonContext) -> None:
    """From now on: hand SIGTERM and SIGINT on to the coordinator; end alone if it is gone, or on
    another machine.
    """
    heard = Signals()

    def asked() -> None:
        heard.read()
        if not context.is_home:
            loop.post(StopRequested("told to end"))
        elif _signal_coordinator(context.directory):
            log.warning("told to end: the whole run is stopped, in order")
        else:
            loop.post(StopRequested("told to end, and no coordinator is known"))

    loop.watch(heard.fileno(), asked)


def _signal_coordinator(directory: Path) -> bool:
    """Whether there was a coordinator to signal, as far as that can be known."""
    try:
        run = database.read(directory)
    except (DlctlError, OSError, sqlite3.Error) as error:
        log.warning("cannot read who the coordinator is: %s", error)
        return False
    return processes.send_signal(run.get("pid"), run.get("pid_start"), signal.SIGTERM)
