"""Writing what a user has asked for to the place that the user names, as with `-o FILE`.

A regular file is replaced atomically, behind a link too. Anything else of that name, such as a FIFO
or a device, is written to and stays what it is.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dlctl.errors import UsageError, os_errors_as
from dlctl.util import notes, regular
from dlctl.util.fsync import replacing

STDOUT = Path("/dev/stdout")
"""Standard output, which "-" stands for on a command line."""
BROKEN_PIPE_EXIT_CODE = 141
"""The exit status of a program that wrote to a pipe without a reader: 128 + SIGPIPE."""
READER_S = 60.0
"""Time for another process to open a FIFO for reading."""
POLL_S = 0.05


def is_stdout(path: Path) -> bool:
    """Whether this is standard output, whatever its name; then messages must go to stderr."""
    return path == STDOUT or _is_open_as(1, path)


def is_stream(path: Path) -> bool:
    """Whether this is written to, and not replaced."""
    if is_stdout(path) or _is_open_as(2, path):
        return True
    with suppress(OSError):
        mode = path.stat().st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def is_open_stream(file: IO[bytes]) -> bool:
    """Whether a file of `writing` is a stream, which takes bytes only: it has no path."""
    return isinstance(file.name, int)


def check(path: Path) -> None:
    """Raises UsageError if nothing can be written to a file of this name."""
    if is_stream(path):
        return
    if path.is_dir():
        hint = f"name a file in it, as in {shlex.quote(str(path / 'FILE'))}"
        raise UsageError("the output is a directory", where=str(path), hint=hint)
    if path.is_symlink() and not path.exists():
        what = "the output is a link to a file that does not exist"
        raise UsageError(what, where=str(path), hint=f"ls -l {shlex.quote(str(path))}")
    if not path.parent.is_dir():
        raise UsageError(
            "the output would be in a directory that does not exist",
            where=str(path),
            hint=f"mkdir -p {shlex.quote(str(path.parent))}",
        )


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """All of the content; raises as `writing`."""
    with writing(path, mode) as file:
        file.write(data)


@contextmanager
def writing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """The open output. A regular file appears when the block succeeds, with this mode less the
    umask; else the old one stays.

    Raises DlctlError; UsageError as `check`; and BrokenPipeError if nobody reads standard output
    any more, which is no error.
    """
    check(path)
    parent = shlex.quote(str(path.parent))
    with os_errors_as("cannot write", path, f"ls -ld {parent}; df -h {parent}"):
        if not is_stream(path):
            with replacing(_behind_links(path), mode) as file:
                yield file
            return
        try:
            with os.fdopen(_opened(path), "wb") as file:
                yield file
            return
        except BrokenPipeError:
            if not is_stdout(path):
                raise
    raise BrokenPipeError


def _is_open_as(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _behind_links(path: Path) -> Path:
    """The file itself. The kernel may refuse to follow a link that another user has planted."""
    if path.is_symlink():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    return Path(os.path.realpath(path))


def _opened(path: Path) -> int:
    """A descriptor of a stream; waits until another process reads a FIFO. Raises OSError."""
    if is_stdout(path):
        if sys.stdout is None:  # Its number may be that of another file.
            raise OSError(errno.EBADF, "standard output is closed")
        sys.stdout.flush()
        return os.dup(1)
    if _is_open_as(2, path):
        return os.dup(2)
    began, is_announced = time.monotonic(), False
    while (descriptor := _attempt(path)) is None:
        if not is_announced:
            notes.note(f"waiting for a process that reads {path}")
        is_announced = True
        if time.monotonic() - began >= READER_S:
            raise OSError(errno.ENXIO, f"no process reads this FIFO for {READER_S:.0f} s")
        time.sleep(POLL_S)
    os.set_blocking(descriptor, True)
    return descriptor


def _attempt(path: Path) -> int | None:
    """Open the file; None: a FIFO that nobody has opened for reading yet."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        mode = path.stat().st_mode
        if error.errno == errno.ENXIO and stat.S_ISFIFO(mode):
            return None
        if stat.S_ISSOCK(mode):
            raise OSError(error.errno, f"it is {regular.kind(mode)}") from None
        raise
