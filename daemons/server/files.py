"""File system helpers for both kinds of stored states: private directories, and locks.

Two processes must never write the same state. The kernel releases a lock on an open file when the
process that holds it exits, for any reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
import time
from abc import ABC, abstractmethod
from pathlib import Path
from threading import Event
from typing import Self

from dlctl.errors import DlctlError
from dlctl.shards.base import Held, NoRoom, Point
from dlctl.util.flock import GLANCE_S, RETRY_S, is_locked_within
from dlctl.util.units import format_size

LOCK_S = 10.0
"""How long to wait for a process that is about to exit."""
REPLACED = "another file has replaced the state that this server has open"
OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def own_directory(directory: Path) -> None:
    """Create a directory and, if missing, its parent, with mode 0700.

    Raises DlctlError if either cannot be created, is a link, or belongs to another user.
    """
    for path in (directory.parent, directory):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.lstat()
        except OSError as error:
            raise failure("make the directory of the servers' states", path, error) from error
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise DlctlError(
                "the directory of the servers' states must be a directory of yours, not a link",
                where=str(path),
                hint=f"remove {path} or set [servers] state_dir to a directory of your own",
            )


def open_locked(path: Path, *, create: bool) -> int:
    """Open a file of this user and lock it until the descriptor is closed.

    Raises FileNotFoundError, Held if another process still has it after `LOCK_S`, or DlctlError.
    """
    until = time.monotonic() + LOCK_S
    while True:
        descriptor = _open(path, create)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_there(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Held(
                    f"another process has the state open{_holder(descriptor)}",
                    where=str(path),
                    hint="a server of an earlier generation still runs: end it",
                ) from None
            Event().wait(RETRY_S)
        os.close(descriptor)


def create_locked(path: Path) -> int:
    """Create a new file and lock it until the descriptor is closed.

    Raises DlctlError, also if it exists: it may belong to a server that has replaced this one.
    """
    try:
        descriptor = os.open(path, OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise DlctlError(REPLACED, where=str(path)) from error
    except OSError as error:
        raise failure("make the state", path, error) from error
    if is_locked_within(GLANCE_S, descriptor) and is_there(path, descriptor):
        return descriptor
    os.close(descriptor)
    raise DlctlError(REPLACED, where=str(path))


def _open(path: Path, create: bool) -> int:
    try:
        descriptor = os.open(path, OPEN | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise failure("open the state", path, error) from error
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and info.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise DlctlError("a state must be a plain file of yours", where=str(path))


def is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still names this file: another program may have removed it."""
    try:
        found = path.lstat()
    except OSError:
        return False  # For any reason: other processes will not find it either.
    own = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _holder(descriptor: int) -> str:
    """The process that has a lock on a file, for a message: ": pid 4711"."""
    inode = os.fstat(descriptor).st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if "FLOCK" in fields and "->" not in fields and fields[5].endswith(f":{inode}"):
            return f": pid {fields[4]}"
    return ""


def failure(what: str, path: Path, error: OSError, size_bytes: int = 0) -> DlctlError:
    """A DlctlError that states what failed, where, why and what to do next; NoRoom if more disk
    space would help."""
    size = f" of {format_size(size_bytes)}" if size_bytes else ""
    said = f"cannot {what}{size}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space there, or set [servers] state_dir to a directory that has room"
        return NoRoom(said, where=str(path), hint=hint)
    refused = error.errno in (errno.EACCES, errno.EPERM)
    place = shlex.quote(str(path.parent))
    hint = f"ls -ld {place}" if refused else f"see why with dmesg; findmnt -T {place}"
    return DlctlError(said, where=str(path), hint=hint)


class TablesInFiles(ABC):
    """Storages of one server in files: of its parameters, and of its other tables."""

    def __init__(self, places: list[Path], point: Point) -> None:
        """`places`: directories, the preferred one first."""
        self.places = places
        self.point = point
        self._others: dict[str, Self] = {}

    def of_table(self, name: str) -> Self:
        return self._others.setdefault(name, type(self)(self.places, self.point))

    def _tables(self) -> list[Self]:
        return [*self._others.values(), self]

    def is_missing(self) -> bool:
        """Whether a file in use was removed or renamed."""
        return any(one.is_own_missing() for one in self._tables())

    def put_back(self) -> str:
        """Re-create the missing files of all tables; returns the place of the last one. Call it
        between two events.

        A failure does not prevent the others: its error, DlctlError or OSError, is raised in the
        end.
        """
        place, failed = "", list[DlctlError | OSError]()
        for one in self._tables():
            try:
                place = one.restore_own() if one.is_own_missing() else place
            except (DlctlError, OSError) as error:
                failed.append(error)
        if failed:
            raise failed[-1]
        return place

    def discard(self) -> None:
        """Remove the files of all tables, and the directory with the last one."""
        for one in self._tables():
            one._remove()

    @abstractmethod
    def is_own_missing(self) -> bool: ...

    @abstractmethod
    def restore_own(self) -> str: ...

    @abstractmethod
    def _remove(self) -> None: ...
