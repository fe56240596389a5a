"""What SIGTERM does to a daemon; to a server or an agent it stops the whole run, in order.

If only that process exited, its shard or its daemons would be lost. When a machine shuts down,
every process gets the signal at the same time: this way the servers run until the shards are saved.

On other machines than the coordinator's the signal ends only that daemon, like a crash: an agent
with the daemons of its host, a server with its shard. The coordinator restarts it, or continues
without that host.

At the end of a run daemons are asked to exit by a message; only one that is not connected gets a
signal (`dlctl/roles/coordinator/shutdown.py`).
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from daemons.loop import Loop, Signals
from daemons.process import DaemonContext
from dlctl.launch import local
from dlctl.util import processes
from dlctl.wire.machine import StopRequested

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

    loop.watch(heard.fd, asked)


def _signal_coordinator(directory: Path) -> bool:
    """Whether a coordinator was signalled; False if none is found."""
    try:
        leaders = [each for each in local.living(directory) if each.role == "coordinator"]
        sent = [processes.send_signal(each.pid, each.start, signal.SIGTERM) for each in leaders]
        return any(sent)
    except OSError as error:
        log.warning("cannot find the coordinator: %s", error)
        return False
