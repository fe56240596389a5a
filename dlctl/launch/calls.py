"""One call to another machine: a command that runs `daemons.node` there, a JSON object as request,
and one as answer.

The request may contain secrets, so it is passed only through standard input, from an anonymous
file. The size of the answer is limited: the other machine is not trusted.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from dlctl.job.config import Host
from dlctl.launch.answers import (
    ANSWER_BYTES_MAX,
    NO_ANSWER,
    NO_COMMAND,
    TOO_MUCH,
    CallResult,
    read,
)
from dlctl.launch.commands import in_memory, kill_group

WORDS_BYTES_MAX = 64 * 1024
"""The last bytes of standard error that are stored; those before are dropped."""
CHUNK_BYTES = 64 * 1024


def node_words(host: Host) -> list[str]:
    """What answers requests on a host. A login starts at home, so "~/" needs no shell."""
    python = host.python or sys.executable
    if python.startswith("~/"):
        python = f".{python[1:]}"
    return [python, "-P", "-m", "daemons.node"]


class Call:
    """A request in flight. No method blocks; `wait_for` below does."""

    def __init__(
        self, host: str, command: list[str], request: Mapping[str, Any], timeout_s: float
    ) -> None:
        """`command`: runs `daemons.node` on this host, for the request. Raises OSError."""
        self.host = host
        self.until = time.monotonic() + timeout_s
        self._answer: CallResult | None = None
        self._output, self._words = bytearray(), bytearray()
        self._epoll = select.epoll()
        self._open: dict[int, bytearray] = {}
        self._pidfd = -1
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._begin(command, request)
        except FileNotFoundError as error:
            self._answer = CallResult(self.host, None, NO_COMMAND, str(error))
            self._epoll.close()
        except BaseException:
            self._epoll.close()
            raise

    def _begin(self, command: list[str], request: Mapping[str, Any]) -> None:
        memory = in_memory(json.dumps(request).encode())
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=memory,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            os.close(memory)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        pipes = ((self._popen.stdout, self._output), (self._popen.stderr, self._words))
        self._open = {pipe.fileno(): buffer for pipe, buffer in pipes}
        self._pidfd = os.pidfd_open(self._popen.pid)
        for fd in self._open:
            os.set_blocking(fd, False)
        for fd in (*self._open, self._pidfd):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `poll` has something to do; -1 when the answer is complete."""
        return -1 if self._answer is not None else self._epoll.fileno()

    def poll(self) -> CallResult | None:
        """The answer, if it is complete. After `until` it always is: call this then, too."""
        if self._answer is None:
            ready = [fd for fd, _ in self._epoll.poll(0)]
            for fd in ready:
                if fd in self._open:
                    self._read(fd)
            if self._pidfd in ready:
                # It has exited; a shared connection of ssh may hold the pipes open, and is silent.
                while any(self._read(fd) for fd in list(self._open)):
                    continue
                self._end(None)
            elif len(self._output) > ANSWER_BYTES_MAX:
                self._end(TOO_MUCH)
            elif time.monotonic() >= self.until:
                self._end(NO_ANSWER)
        return self._answer

    def cancel(self) -> None:
        """Stop waiting. The remote operation is not aborted."""
        if self._answer is None:
            self._end(NO_ANSWER)

    def _read(self, fd: int) -> bool:
        """Read one piece; returns whether there may be more."""
        try:
            piece = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        buffer = self._open[fd]
        buffer += piece
        if buffer is self._words:
            del buffer[:-WORDS_BYTES_MAX]
        if not piece:
            self._epoll.unregister(fd)
            del self._open[fd]
        return bool(piece) and len(buffer) <= ANSWER_BYTES_MAX

    def _end(self, why: int | None) -> None:
        """`why`: a status of `answers`; then the command is killed. None: it has exited."""
        assert self._popen is not None
        if why is not None:
            kill_group(self._popen)
        status = self._popen.wait()
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._pidfd)
        self._epoll.close()
        if len(self._output) > ANSWER_BYTES_MAX:
            why = TOO_MUCH
        output = bytes(self._output) if why != TOO_MUCH else b""
        answer = read(self.host, status, output, bytes(self._words))
        if why is not None:
            answer = answer._replace(value=None, status=why)
        self._answer = answer


def wait_for(calls: Mapping[str, Call]) -> dict[str, CallResult]:
    """The answers of all these calls, in their order. Overdue calls are killed, and all unfinished
    ones if waiting is interrupted.
    """
    poller = select.poll()
    for call in calls.values():
        if call.fileno() >= 0:
            poller.register(call.fileno(), select.POLLIN)
    found: dict[str, CallResult] = {}
    try:
        while True:
            for name, call in calls.items():
                fd = call.fileno()
                answer = call.poll()
                if answer is not None and name not in found:
                    found[name] = answer
                    if fd >= 0:
                        poller.unregister(fd)
            waiting = [call.until for name, call in calls.items() if name not in found]
            if not waiting:
                return {name: found[name] for name in calls}
            poller.poll(max(0.0, min(waiting) - time.monotonic()) * 1000 + 1)
    finally:
        for call in calls.values():
            call.cancel()
