"""A guest: starts the worker of a machine that joins a run, shows its log, and ends with the run.

python -m daemons.guest DIRECTORY NAME INCARNATION CONTROL_ADDRESS
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daemons.agent.children import Children
from daemons.agent.template import Template
from daemons.files.file_sender import ON_HOSTS, FileSender
from daemons.guest.begin import JOIN_FILE
from daemons.guest.shown_log import ShownLog
from daemons.loop import Loop
from daemons.process import in_words
from dlctl import __version__
from dlctl.control import invitation
from dlctl.errors import DlctlError, UsageError
from dlctl.job import config
from dlctl.launch.base import Credentials
from dlctl.roles.agent.guest import Guest
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.runs import paths
from dlctl.util import regular
from dlctl.wire.messages import Register, Spawn

log = logging.getLogger("dlctl")


@dataclass(frozen=True, slots=True)
class GuestContext:
    directory: Path
    control: str
    credentials: Credentials
    program: dict[str, Any]
    """The user's script or module, and its arguments."""
    processes: int
    """Of this worker, as the user's command says."""

    def write_job(self, spawn: Spawn) -> None:
        """The run's job with the program of this machine, for the worker that starts now."""
        try:
            job = config.of_stored(json.loads(zlib.decompress(spawn.job)))
        except (zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DlctlError(f"the run's job cannot be read: {error}") from error
        if not job.has_loop:
            raise UsageError("this run trains a task: only one with a script can be joined")
        here = replace(job.job, **self.program | {"args": tuple(self.program["args"])})
        workers = replace(job.workers, processes=self.processes)
        content = json.dumps(config.to_dict(replace(job, job=here, workers=workers)), indent=1)
        paths.write(self.directory / "job.json", content.encode(), 0o600)


def serve(directory: Path, name: str, incarnation: int, control: str) -> int:
    join = json.loads(regular.read_bytes(directory / JOIN_FILE))
    made = invitation.load(Path(join["invitation"]))
    registration = Register(
        made.run, "guest", name, incarnation, os.getpid(), socket.gethostname(), __version__
    )
    credentials = Credentials(made.secret, made.coordinator)
    context = GuestContext(directory, control, credentials, join["program"], join["processes"])
    loop = Loop(secret=made.secret)
    shown = ShownLog(directory)
    template = Template(directory, name)  # It begins once there is a job.
    Children(context, loop, lambda spawn: _prepare(context, shown, spawn), [template])
    FileSender(loop, directory, name, ON_HOSTS)
    loop.chores.append(shown.look)
    loop.stop_on_signals()
    loop.transport.connect(COORDINATOR, control, made.coordinator)
    code = loop.run(Guest(registration, config.Timeouts().resend_s))
    shown.look()
    return code


def _prepare(context: GuestContext, shown: ShownLog, spawn: Spawn) -> None:
    context.write_job(spawn)
    shown.follow(spawn.name, spawn.incarnation)


def main() -> None:
    directory, name, incarnation, control = sys.argv[1:]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("dlctl join: %(message)s"))
    for logger, level in (("dlctl", logging.INFO), ("daemons", logging.WARNING)):
        logging.getLogger(logger).addHandler(handler)
        logging.getLogger(logger).setLevel(level)
    try:
        with paths.held(Path(directory)):
            code = serve(Path(directory), name, int(incarnation), control)
    except BlockingIOError:
        log.error("another process on this machine joins with this invitation")
        code = 1
    except DlctlError as error:
        log.error("%s", in_words(error))
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)


main()
