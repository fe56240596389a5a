"""Only one command at a time starts a job: the next one then finds that it runs.

The lock is a file of its own, beside the index by which runs are found. The job file will not do:
NFS refuses to lock a file that is not open for writing, and a job file may not be writable.

    locks/<hash of the job file's path>    pid and host of the command that has it
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlctl.cli import console, values
from dlctl.errors import DlctlError, TimedOut
from dlctl.runs import paths

HELD_S = 600.0
"""For another command: it may be checking a large checkpoint, or waiting for daemons to end."""
TELL_S = 1.0
POLL_S = 0.05
NO_ROOM = "free some space there"
NO_LOCKS = (
    "have this directory writable, and where files can be locked; XDG_STATE_HOME says where it is, "
    "and with it by which names runs are found"
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def starting(file: Path, timeout_s: float = HELD_S) -> Iterator[None]:
    """Nobody else of this user starts the job of this file meanwhile.

    Raises TimedOut if somebody is still at it after `timeout_s`, and DlctlError if nothing can be
    locked there.
    """
    path = lock_path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, file, timeout_s)
    except OSError as error:
        raise DlctlError(
            f"cannot lock the job: {error.strerror or error}",
            where=str(path),
            hint=NO_ROOM if error.errno in _FULL else NO_LOCKS,
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # What stays is empty of meaning, and locked by nobody.
            path.unlink()
        os.close(descriptor)


def lock_path(file: Path) -> Path:
    """One for each job file, by whatever way it is named."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return paths.index_dir().parent / "locks" / name[:32]


def _lock(path: Path, file: Path, timeout_s: float) -> int:
    """A descriptor of the file at `path`, locked. Raises OSError and TimedOut."""
    began, told = time.monotonic(), False
    while (descriptor := _try(path)) is None:
        waited_s = time.monotonic() - began
        if waited_s >= min(TELL_S, timeout_s) and not told:
            told = True
            text = f"waiting for another command that starts this job ({_holder(path)})"
            console.note(console.escape(text))
        if waited_s >= timeout_s:
            raise TimedOut(
                f"another command ({_holder(path)}) has been starting {values.path(file)} for "
                f"{values.duration(waited_s)}",
                where=str(path),
                hint="dlctl ps",
            )
        time.sleep(POLL_S)
    with suppress(OSError):  # On a full disk nobody is told who has it.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _try(path: Path) -> int | None:
    """The same, or None if somebody has it, or has just removed it. Raises OSError."""
    descriptor = os.open(path, _OPEN, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    """Who has it, as it says itself."""
    try:
        return path.read_text(errors="replace")[:200] or "it has not said which"
    except OSError:
        return "it is just ending"
