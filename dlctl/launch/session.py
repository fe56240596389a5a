"""A session with a machine: many requests over one login, or to a local process.

The remote end is `daemons.node`: one JSON object per line, in both directions. Every session has
its own connection, so that it tests a login and measures its time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dlctl.errors import DlctlError
from dlctl.job.config import Host
from dlctl.launch.answers import (
    ANSWER_BYTES_MAX,
    MARK,
    NO_ANSWER,
    NO_COMMAND,
    NOT_OURS,
    TOO_MUCH,
    CallResult,
    explain,
    read,
    value_of,
)
from dlctl.launch.calls import node_words
from dlctl.launch.commands import kill_group
from dlctl.util.hostnames import HERE

WORDS_BYTES_MAX = 64 * 1024
END_S = 2.0


class Session:
    """A session of requests to one host. Must be closed. Not thread-safe."""

    def __init__(
        self,
        host: str,
        command: list[str],
        explained: Callable[[CallResult], DlctlError] = explain,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: runs `daemons.node` on this host. If it fails, the first `ask` raises.
        env: of the command; None: that of this process.
        """
        self.host = host
        self._explained = explained
        self._output, self._words = bytearray(), bytearray()
        self._has_stderr = True
        self._is_known = False
        """Whether the remote end has sent `MARK`."""
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env=env,
            )
        except FileNotFoundError as error:
            answer = CallResult(self.host, None, NO_COMMAND, str(error))
            self._failure: DlctlError | None = explained(answer)
        else:
            self._failure = None

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one request. Raises DlctlError; after an error that the remote end has not
        sent, every further request fails.
        """
        if self._failure is not None:
            raise self._failure
        until = time.monotonic() + timeout_s
        with suppress(BrokenPipeError):  # Its last output has the cause.
            self._put(json.dumps(request).encode() + b"\n")
        try:
            if not self._is_known:
                self._skip_to_mark(until)
            value = json.loads(self._line(until))
            if type(value) is not dict:
                raise ValueError("it is no object")
        except (ValueError, RecursionError):
            raise self._fail(NOT_OURS) from None
        return value_of(CallResult(self.host, value, 0, ""), self._explained)

    def close(self) -> None:
        """End the local and the remote process."""
        popen, self._popen = self._popen, None
        if popen is None:
            return
        assert popen.stdin is not None
        with suppress(OSError):
            popen.stdin.close()
        try:
            popen.wait(END_S)
        except subprocess.TimeoutExpired:
            kill_group(popen)
            popen.wait()
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()

    def interrupt(self) -> None:
        """End it at once; a thread that waits for an answer gets an error."""
        popen = self._popen
        if popen is not None:
            kill_group(popen)

    # ------------------------------------------------------------ bytes

    def _put(self, data: bytes) -> None:
        assert self._popen is not None
        assert self._popen.stdin is not None
        while data:
            data = data[self._popen.stdin.write(data) or 0 :]

    def _skip_to_mark(self, until: float) -> None:
        """Skip what the login prints before the probe starts."""
        while True:
            _, mark, rest = (b"\n" + self._output).partition(b"\n" + MARK + b"\n")
            if mark:
                self._output, self._is_known = bytearray(rest), True
                return
            self._more(until)

    def _line(self, until: float) -> bytes:
        while True:
            line, end, rest = self._output.partition(b"\n")
            if end:
                self._output = rest
                return bytes(line)
            self._more(until)

    def _more(self, until: float) -> None:
        if len(self._output) > ANSWER_BYTES_MAX:
            raise self._fail(TOO_MUCH)
        if not self._read(until):
            raise self._fail(None)

    def _read(self, until: float) -> bool:
        """Read more output; False at its end."""
        assert self._popen is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        poller = select.poll()
        poller.register(self._popen.stdout, select.POLLIN)
        if self._has_stderr:
            poller.register(self._popen.stderr, select.POLLIN)
        left_s = until - time.monotonic()
        ready = dict(poller.poll(max(0.0, left_s) * 1000))
        if not ready:
            raise self._fail(NO_ANSWER)
        if self._popen.stderr.fileno() in ready:
            said = os.read(self._popen.stderr.fileno(), 1 << 16)
            self._has_stderr = bool(said)
            self._words += said
            del self._words[:-WORDS_BYTES_MAX]
        if self._popen.stdout.fileno() in ready:
            piece = os.read(self._popen.stdout.fileno(), 1 << 16)
            self._output += piece
            return bool(piece)
        return True

    def _fail(self, why: int | None) -> DlctlError:
        """`why`: a status of `answers`; None: the process has exited."""
        popen = self._popen
        assert popen is not None
        assert popen.stderr is not None
        status = why
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                status = popen.wait(END_S)
            self._drain(popen.stderr.fileno())
        kill_group(popen)
        said = b"" if self._is_known or why is not None else bytes(self._output)
        answer = read(self.host, status or 0, said, bytes(self._words))
        self._failure = self._explained(answer)
        self.close()
        return self._failure

    def _drain(self, fd: int) -> None:
        os.set_blocking(fd, False)
        with suppress(BlockingIOError):
            while piece := os.read(fd, 1 << 16):
                self._words += piece
                del self._words[:-WORDS_BYTES_MAX]


def here(host: Host) -> Session:
    """A session with this machine; `host`: its section of the job file."""
    return Session(HERE, node_words(host))
