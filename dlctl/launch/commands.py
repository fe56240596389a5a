"""A command on this machine that is watched by the loop: what it prints goes to memory, and is read
when it has ended. Nobody waits for it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

OUTPUT_BYTES_MAX = 4 << 20
"""Of a large cluster `sinfo` names all nodes."""
LATE = -1001
"""A status that no process has: it was killed after its time was up."""
KILLED_S_MAX = 1.0
"""For one that was killed to end."""


class Said(NamedTuple):
    """How a command has ended."""

    status: int
    """Its exit code, minus a signal, or `LATE`."""
    out: str
    err: str

    def last_line(self) -> str:
        """Of what it said, errors first; "" if it said nothing."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""


class Command:
    """Raises OSError, as FileNotFoundError, if it cannot be started."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self.until = time.monotonic() + timeout_s
        self._files = [os.memfd_create("dlctl", os.MFD_CLOEXEC) for _ in range(2)]
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                start_new_session=True,
            )
        except BaseException:
            self._close_files()
            raise
        self.pidfd = os.pidfd_open(self._popen.pid)
        """Can be read when the command has ended."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.until

    def said(self) -> Said:
        """What it said; to be called once, when it has ended or is late: then it is killed."""
        has_ended = self._popen.poll() is not None
        if not has_ended:
            kill_group(self._popen)
        # One that stands in the kernel (a driver, a dead file server) does not even end by that.
        status = LATE
        with suppress(subprocess.TimeoutExpired):
            status = self._popen.wait(KILLED_S_MAX)
        os.close(self.pidfd)
        out, err = (os.pread(file, OUTPUT_BYTES_MAX, 0) for file in self._files)
        self._close_files()
        said = (out.decode(errors="replace"), err.decode(errors="replace"))
        return Said(status if has_ended else LATE, *said)

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)


def kill_group(leader: subprocess.Popen[Any]) -> None:
    """SIGKILL for a process that leads a group, and for all of that; not if it is reaped already:
    its number may be somebody else's by now.
    """
    if leader.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def in_memory(data: bytes) -> int:
    """A file descriptor from which a process can read this; it is in no file that has a name."""
    memory = os.memfd_create("dlctl", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(data)
        os.lseek(memory, 0, os.SEEK_SET)
    except BaseException:
        os.close(memory)
        raise
    return memory


def wait_for_any(fds: Iterable[int], timeout_s: float) -> None:
    """Until one of them can be read."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def wait(argv: Sequence[str], timeout_s: float) -> Said:
    """Run a command to its end, for those who may wait. Raises OSError.

    Neither it nor what it has started is waited for any longer, as a command may be a wrapper: when
    the time is up all of that is killed, and what outlives its end keeps nobody.
    """
    command = Command(argv, timeout_s)
    try:
        wait_for_any([command.pidfd], timeout_s)
    finally:
        said = command.said()
    return said
