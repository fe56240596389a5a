"""SIGTERM to a server or an agent stops the whole run, in order.

If only that process exited, its shard or its daemons would be lost. When a machine shuts down,
every process gets the signal at the same time: this way the servers run until the shards are saved.

On other machines than the coordinator's the signal ends only that daemon, like a crash: an agent
with the daemons of its host, a server with its shard. The coordinator restarts it, or continues
without that host.
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
    """Forward SIGTERM and SIGINT to the coordinator; stop only this daemon if the coordinator is
    gone or on another machine.
    """
    heard = Signals()

    def asked() -> None:
        heard.read()
        if not context.is_home:
            loop.post(StopRequested("received a signal"))
        elif _signal_coordinator(context.directory):
            log.warning("received a signal: stopping the whole run, in order")
        else:
            loop.post(StopRequested("received a signal, and no coordinator is known"))

    loop.watch(heard.fileno(), asked)


def _signal_coordinator(directory: Path) -> bool:
    """Whether a coordinator was signalled; False if it is unknown."""
    try:
        run = database.read(directory)
    except (DlctlError, OSError, sqlite3.Error) as error:
        log.warning("cannot read the coordinator's pid: %s", error)
        return False
    return processes.send_signal(run.get("pid"), run.get("pid_start"), signal.SIGTERM)
