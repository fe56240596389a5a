"""A command on this machine that the event loop watches: its output goes to memory, and is read
after it has exited. No call blocks on it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

OUTPUT_BYTES_MAX = 4 << 20
"""The largest output that is read: on a large cluster `sinfo` prints every node."""
LATE = -1001
"""A status that no process has: it was killed after its timeout."""
KILLED_S_MAX = 1.0
"""Time for a killed command to exit."""


class CommandOutput(NamedTuple):
    """Status and output of a command."""

    status: int
    """The exit code, minus the number of the signal that ended the command, or `LATE`."""
    out: str
    err: str

    def last_line(self) -> str:
        """The last line of standard error, or of standard output if it is empty; "": both are."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""


class Command:
    """A running command. Raises OSError, as FileNotFoundError, if it cannot be started."""

    def __init__(
        self, argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> None:
        """env: its environment; None: that of this process."""
        self.until = time.monotonic() + timeout_s
        self._files = [os.memfd_create("dlctl", os.MFD_CLOEXEC) for _ in range(2)]
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                start_new_session=True,
                env=env,
            )
        except BaseException:
            self._close_files()
            raise
        self.pidfd = os.pidfd_open(self._popen.pid)
        """Readable when the command has exited."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.until

    def output(self) -> CommandOutput:
        """Its status and output. Call it once, after it has exited; kills it if it is late."""
        has_ended = self._popen.poll() is not None
        if not has_ended:
            kill_group(self._popen)
        # A process blocked in the kernel (a driver, a dead file server) survives even SIGKILL.
        status = LATE
        with suppress(subprocess.TimeoutExpired):
            status = self._popen.wait(KILLED_S_MAX)
        os.close(self.pidfd)
        out, err = (os.pread(file, OUTPUT_BYTES_MAX, 0) for file in self._files)
        self._close_files()
        texts = (out.decode(errors="replace"), err.decode(errors="replace"))
        return CommandOutput(status if has_ended else LATE, *texts)

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)


class ChildProcess(Protocol):
    """A child of this process, such as `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | Any | None:
        """None until it is reaped."""
        ...


def kill_group(leader: ChildProcess) -> None:
    """Send SIGKILL to a process group; not if the leader is reaped, as its pid may be reused."""
    if leader.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def in_memory(data: bytes) -> int:
    """A file descriptor of an anonymous file with this content, open for reading from its start."""
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
    """Wait until one of the descriptors is readable."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def wait(
    argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> CommandOutput:
    """Run a command and block until it exits. Raises OSError.

    At the timeout its whole process group is killed, as the command may be a wrapper. Children that
    outlive the command are not waited for.
    """
    command = Command(argv, timeout_s, env)
    try:
        wait_for_any([command.pidfd], timeout_s)
    finally:
        output = command.output()
    return output
