"""Processes for the other ranks of a worker's replica, forked from a template like the worker.

A worker starts its ranks when it has threads, and must not fork then. So spares are forked before:
they wait, each on a socket, for what they are to become, and end with the worker. A worker that was
not forked has none, and starts its ranks as any other process.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NoReturn

from daemons.parent_death import end_with
from daemons.template import command_line
from daemons.template.forking import MODULE, draw_other_numbers, run
from daemons.template.words import MESSAGE_BYTES_MAX, pair

DESCRIPTORS_MAX = 8
_DESCRIPTORS_END = 1 << 16


class ForkedRank:
    """A process that was a spare; a child of this one, as `subprocess.Popen` is."""

    def __init__(self, pid: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status: int | None = None
        self._lock = threading.Lock()
        """Held while the process is collected: until then the pid is its own."""

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. Several threads may wait."""
        with suppress(ChildProcessError):  # Another thread has collected it.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            if self._status is None:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._status

    def kill(self) -> None:
        with self._lock:
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)


_spares: list[tuple[int, socket.socket]] = []
"""Those of this process: pid and line."""


def fork(argv: Sequence[str], count: int) -> None:
    """Fork `count` spares of the worker with this command line. This process must have no threads,
    and not yet the worker's command line: that must be nobody else's.
    """
    shown = [*argv[:MODULE], f"{argv[MODULE]}.later_rank", *argv[MODULE + 1 : -1]]
    for _ in range(count):
        mine, its = pair()
        worker = os.getpid()
        if not (pid := os.fork()):
            _wait(its, worker, shown)
        its.close()
        _spares.append((pid, mine))


def start_rank(
    argv: Sequence[str],
    *,
    pass_fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
    is_piped: bool = False,
) -> subprocess.Popen[bytes] | ForkedRank:
    """Start a rank: of a spare if there is one, else as a new process. environment: None, for that
    of this process. is_piped: what it prints goes to its `stdout`, else to that of this process.
    Raises OSError.
    """
    environment = dict(os.environ if environment is None else environment)
    rank = _of_spare(argv, pass_fds, environment, is_piped) if _spares else None
    if rank is not None:
        return rank
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_piped else None,
        stderr=subprocess.STDOUT if is_piped else None,
        pass_fds=pass_fds,
        env=environment,
    )


def _of_spare(
    argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str], is_piped: bool
) -> ForkedRank | None:
    """None: the spare is of no use, and ends."""
    pid, line = _spares.pop(0)
    reader, writer = os.pipe() if is_piped else (-1, -1)
    prints = (writer, writer) if is_piped else (1, 2)
    request = json.dumps([list(argv), environment, list(pass_fds)]).encode()
    rank = ForkedRank(pid, os.fdopen(reader, "rb") if is_piped else None)
    try:
        with line:
            if len(request) <= MESSAGE_BYTES_MAX and command_line.fits(argv):
                socket.send_fds(line, [request], [*prints, *pass_fds])
                return rank
    except OSError:
        pass  # It was killed.
    finally:
        if is_piped:
            os.close(writer)
    rank.wait()
    if rank.stdout is not None:
        rank.stdout.close()
    return None


# ---------------------------------------------------------------- in a spare


def _wait(line: socket.socket, worker: int, shown: Sequence[str]) -> NoReturn:
    """Wait for the request, and become that rank."""
    code = 1
    try:
        command_line.rewrite(shown)
        if end_with(worker):  # With the thread that has forked it, the worker's main one.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            _leave_descriptors([0, 1, 2, line.fileno()])
            data, received, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
            if data:
                argv, environment, targets = json.loads(data)
                _move(received, [1, 2, *targets])
                _become(argv, environment)
        code = 0
    except BaseException:  # What the rank itself raises, it reports.
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(argv: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    draw_other_numbers()
    if command_line.rewrite(argv):
        run(argv)


def _move(received: list[int], targets: list[int]) -> None:
    """Leave these descriptors under their new numbers, and standard input."""
    first = max(*targets, *received) + 1
    apart = [os.dup2(fd, first + n) for n, fd in enumerate(received)]  # Out of each other's way.
    for fd, target in zip(apart, targets, strict=True):
        os.dup2(fd, target)
    _leave_descriptors([0, *targets])


def _leave_descriptors(kept: list[int]) -> None:
    ends = [-1, *sorted(kept), _DESCRIPTORS_END]
    for below, above in itertools.pairwise(ends):
        if below + 1 < above:  # Of an empty range below 0 some versions of Python close all.
            os.closerange(below + 1, above)
