"""A process that the template has forked becomes the daemon that it would be if it had been
started with its own command line.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from typing import NoReturn

from daemons.template import spares
from daemons.template.command_line import rewrite
from daemons.template.forking import draw_other_numbers, run
from daemons.template.words import MESSAGE_BYTES_MAX, StartRequest

PARENT_S, LOOK_S = 5.0, 0.0002
"""Time for the agent to become the parent; interval of the checks."""
GO_S = 10.0
"""Time for the agent to send the credentials, which are ready."""
_DESCRIPTORS_MAX = 1 << 16


def become(request: StartRequest, log: int, line: int) -> NoReturn:
    """Run the daemon of this request; log, line: descriptors."""
    code = 1
    try:
        os.setsid()
        if _has_parent(request.agent):
            _take_descriptors(log, line)
            spares.fork(request.argv, request.spares)
            if rewrite(request.argv):
                os.environ.update(request.environment)
                draw_other_numbers()
                if _told_to_go(socket.socket(fileno=os.dup(3))):
                    run(request.argv)
                code = 0
    except BaseException:  # What the daemon itself raises, it logs.
        traceback.print_exc()
    finally:
        os._exit(code)


def _has_parent(agent: int) -> bool:
    """Whether the agent is the parent, once the process between the two has exited."""
    deadline = time.monotonic() + PARENT_S
    while os.getppid() != agent:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _take_descriptors(log: int, line: int) -> None:
    """Leave the log as 1 and 2, the line as 3, and no other."""
    log, line = os.dup(log), os.dup(line)
    for target, source in ((1, log), (2, log)):
        os.dup2(source, target)
    moved = os.dup(line)
    os.dup2(moved, 3, inheritable=False)
    os.closerange(4, _DESCRIPTORS_MAX)


def _told_to_go(line: socket.socket) -> bool:
    """Tell the agent the pid; leave its answer, the credentials, as standard input."""
    line.settimeout(GO_S)
    try:
        line.send(str(os.getpid()).encode())
        credentials = line.recv(MESSAGE_BYTES_MAX)
    except OSError:  # The agent has given up: it has started another process instead.
        return False
    line.close()
    os.close(3)
    if not credentials:
        return False
    reader, writer = os.pipe()
    os.write(writer, credentials)  # Fits the pipe buffer, so this does not block.
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    return True
