"""sys.stdout and sys.stderr of a worker, and their way into its log.

They are text streams over descriptors 1 and 2, as Python's own are, so the task and libraries can
do with them what they do anywhere. The descriptors are pipes, so output of C code and of child
processes takes the same way. Another process reads the pipes and writes the log (`print_reader`).

Lines of one process keep their order, on both streams. Between them and the worker's own log lines,
which it writes itself, and between several processes, it is kept up to about a millisecond.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import logging
import os
import select
import stat
import subprocess
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from daemons.logs import Rotating

log = logging.getLogger("dlctl")
BEGUN_CHARS_MAX = 8192
START_S_MAX = 30.0
"""Time for the process that reads to start: a loaded machine may be slow."""
ORDER_S_MAX, ORDER_LOOK_S = 0.02, 0.00005
_LINE_BUFFERED = 1
"""_IOLBF of the C library."""
_C_BUFFER = ctypes.create_string_buffer(8192)


def capture(handler: Rotating, name: str, incarnation: int) -> None:
    """Make lines of the log of what this process and its children print from now on. If that is
    impossible, it goes to the log as it is, without times and daemon.
    """
    log_file = handler.file
    log_file.leave_streams()
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    fds = (*(reader for reader, _ in pipes), os.pidfd_open(os.getpid()))
    identity = (str(log_file.path), name, str(incarnation))
    try:
        # -P, as for every daemon: see `launch.base.argv`.
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "daemons.worker.task.print_reader",
                *identity,
                *map(str, fds),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # The agent kills the worker's process group.
            timeout=START_S_MAX,
            check=True,
        )
        for descriptor, (_, writer) in zip((1, 2), pipes, strict=True):
            os.dup2(writer, descriptor)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("printed lines will have no times in the log: %s", error)
    for fd in (*fds, *(writer for _, writer in pipes)):
        os.close(fd)
    _buffer_lines_of_c()
    use_streams(lambda: log_file.descriptors[0])


def _buffer_lines_of_c() -> None:
    """Buffer the C library's output by lines. By default it would keep 4 KiB of a pipe's output, or
    nothing at all (PYTHONUNBUFFERED), so that lines of several processes are mixed.
    """
    with suppress(ValueError):  # A C library may have another name for the stream.
        library = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(library, "stdout")
        size = ctypes.c_size_t(len(_C_BUFFER))
        library.setvbuf(stdout, _C_BUFFER, _LINE_BUFFERED, size)


def use_streams(instead: Callable[[], int] | None = None) -> None:
    """Make sys.stdout and sys.stderr whole-line streams of descriptors 1 and 2. instead: returns a
    descriptor to use if a pipe there has lost its reader.
    """
    sys.stdout = sys.__stdout__ = Stream(1, "<stdout>", instead)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Stream(2, "<stderr>", instead)  # type: ignore[misc]


def end_lines() -> None:
    """Write unfinished lines, before this process exits."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, Stream):
            stream.end_lines()


@contextmanager
def copied(chars_max: int) -> Iterator[io.StringIO]:
    """What is printed to stdout in the block, also by other threads: its beginning."""
    copy, stream = io.StringIO(), sys.__stdout__
    if isinstance(stream, Stream):
        stream.copy = lambda text: copy.write(text[: max(0, chars_max - copy.tell())])
    try:
        yield copy
    finally:
        if isinstance(stream, Stream):
            stream.copy = None


class Stream(io.TextIOWrapper):
    """A text stream that passes on whole lines, at once.

    Each thread has its own unfinished line, so that lines of two threads are not mixed. `flush`
    passes it on.
    """

    def __init__(
        self, descriptor: int, name: str, instead: Callable[[], int] | None = None
    ) -> None:
        super().__init__(
            _Descriptor(descriptor, name, instead),  # as python -u does
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self.mode = "w"  # type: ignore[misc]  # an attribute of every text file
        self.copy: Callable[[str], object] | None = None
        """A function that also receives what is written."""
        self._begun: dict[int, str] = {}
        """Thread -> the beginning of its unfinished line. Without a lock, which a signal handler or
        a forked process might wait for in vain: each thread only touches its own line.
        """
        os.register_at_fork(after_in_child=self._begun.clear)

    def write(self, text: str) -> int:
        if self.copy is not None:
            self.copy(text)
        if self.write_through or not isinstance(text, str):
            return super().write(text)
        thread = threading.get_ident()
        lines, newline, rest = (self._begun.pop(thread, "") + text).rpartition("\n")
        if len(rest) > BEGUN_CHARS_MAX:
            lines, newline, rest = lines + newline + rest, "", ""
        if lines or newline:
            super().write(lines + newline)
        if rest:
            self._begun[thread] = rest
        return len(text)

    def flush(self) -> None:
        if begun := self._begun.pop(threading.get_ident(), ""):
            super().write(begun)
        super().flush()

    def end_lines(self) -> None:
        """Pass on the unfinished lines of all threads."""
        with suppress(ValueError, OSError):  # The task may have detached the buffer.
            for begun in [self._begun.pop(thread, "") for thread in [*self._begun]]:
                super().write(begun)
            super().flush()


class _Descriptor(io.FileIO):
    """A descriptor that stays open, unbuffered. Without a lock: it would stay held in a process
    that another thread forks meanwhile.
    """

    _newest: ClassVar[_Descriptor | None] = None
    """The stream that was written to last."""

    def __init__(self, descriptor: int, name: str, instead: Callable[[], int] | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._instead = instead

    def _await_reader(self) -> None:
        """Wait a moment until the reader has what was written, so that lines of two streams are
        logged in their order.
        """
        deadline, unread = time.monotonic() + ORDER_S_MAX, array("i", [1])
        with suppress(OSError):
            while stat.S_ISFIFO(os.fstat(self.fileno()).st_mode):
                fcntl.ioctl(self.fileno(), termios.FIONREAD, unread)
                if not unread[0] or time.monotonic() > deadline:
                    return
                time.sleep(ORDER_LOOK_S)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write all of it, whatever the task has done to the descriptor: a child process may have
        made it non-blocking.
        """
        before, _Descriptor._newest = _Descriptor._newest, self
        if before is not None and before is not self:
            before._await_reader()
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            try:
                written = super().write(left)
            except BrokenPipeError:
                if self._instead is None:
                    raise
                os.dup2(self._instead(), self.fileno())
                continue
            if written is None:
                select.select((), (self.fileno(),), ())
            left = left[written or 0 :]
        return count

    def close(self) -> None:
        """The task may close its streams, and print later all the same."""
