"""File system helpers for both kinds of stored states: private directories, and locks.

Two processes must never write the same state. The kernel releases a lock on an open file when the
process that holds it exits, for any reason.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Self

from dlctl.errors import DlctlError
from dlctl.shards.errors import NoRoom, StateHeld
from dlctl.shards.log import Point
from dlctl.util import regular
from dlctl.util.flock import is_locked_within
from dlctl.util.fsync import sync_directory
from dlctl.util.regular import NotRegular
from dlctl.util.units import format_size

LOCK_S = 10.0
"""How long to wait for a process that is about to exit."""
OPEN = os.O_RDWR | os.O_NOFOLLOW
NEW = os.O_CREAT | os.O_EXCL


def own_directory(directory: Path) -> None:
    """Create a directory and, if missing, its parent, with mode 0700. Their names are synced: a
    power loss could lose them otherwise, and the files in them.

    Raises DlctlError if either cannot be created, is a link, or belongs to another user.
    """
    for path in (directory.parent, directory):
        try:
            is_new = not path.exists()
            path.mkdir(mode=0o700, exist_ok=True)
            if is_new or os.access(path.parent, os.R_OK):  # A user may only enter /home.
                sync_directory(path.parent)
            info = path.lstat()
        except OSError as error:
            raise failure("make the directory of the servers' states", path, error) from error
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise DlctlError(
                "the directory of the servers' states must be a directory of yours, not a link",
                where=str(path),
                hint=f"remove {path} or set [servers] state_dir to a directory of your own",
            )


def open_locked(path: Path, flags: int = 0) -> int:
    """Open a file of this user and lock it until the descriptor is closed.

    flags: 0 for an existing file, O_CREAT, or O_CREAT | O_EXCL for a new one. Raises
    FileNotFoundError, Held if another process still has it after `LOCK_S`, or DlctlError, also if a
    new file exists: it may belong to a server that has replaced this one.
    """
    while True:
        descriptor = _open(path, flags)
        is_locked = is_locked_within(LOCK_S, descriptor)
        # A process that has removed the file may live on, with a lock that is of no use.
        if is_there(path, descriptor):
            if is_locked:
                return descriptor
            message = f"another process has the state open{_holder(descriptor)}"
            os.close(descriptor)
            hint = "a server of an earlier term still runs: end it"
            raise StateHeld(message, where=str(path), hint=hint)
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = regular.descriptor(path, OPEN | flags, 0o600)
    except FileNotFoundError:
        raise
    except NotRegular as error:
        raise DlctlError(
            f"the state is {error.kind}, not a regular file", where=str(path)
        ) from error
    except FileExistsError as error:
        message = "another file has replaced the state that this server has open"
        raise DlctlError(message, where=str(path)) from error
    except OSError as error:
        raise failure("open the state", path, error) from error
    info = os.fstat(descriptor)
    if info.st_uid == os.getuid() and info.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise DlctlError("a state must be a file of yours, with one name", where=str(path))


def _holder(descriptor: int) -> str:
    """The process that has locked this file, for a message: ": pid 4711"."""
    with suppress(OSError):
        lock = rf": FLOCK .* (\d+) \S+:{os.fstat(descriptor).st_ino} "
        if found := re.search(lock, Path("/proc/locks").read_text()):
            return f": pid {found[1]}"
    return ""


def is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still names this file: another program may have removed it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False  # For any reason: other processes will not find it either.


def failure(what: str, path: Path, error: OSError, size_bytes: int = 0) -> DlctlError:
    """A DlctlError that states what failed, where, why and what to do next; NoRoom if more disk
    space would help."""
    size = f" of {format_size(size_bytes)}" if size_bytes else ""
    text = f"cannot {what}{size}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space there, or set [servers] state_dir to a directory that has room"
        return NoRoom(text, where=str(path), hint=hint)
    refused = error.errno in (errno.EACCES, errno.EPERM)
    place = shlex.quote(str(path.parent))
    hint = f"ls -ld {place}" if refused else f"see why with dmesg; findmnt -T {place}"
    return DlctlError(text, where=str(path), hint=hint)


class TablesInFiles(ABC):
    """Storages of one server in files: of its parameters, and of its other tables."""

    def __init__(self, places: list[Path], point: Point) -> None:
        """`places`: directories, the preferred one first."""
        self.places = places
        self.point = point
        self._others: dict[str, Self] = {}

    def of_table(self, name: str) -> Self:
        return self._others.setdefault(name, type(self)(self.places, self.point))

    def tables(self) -> list[Self]:
        return [*self._others.values(), self]

    def discard(self) -> None:
        """Remove the files of all tables, and the directory with the last one."""
        for one in self.tables():
            one._remove()

    @abstractmethod
    def is_missing(self) -> bool:
        """Whether a file of this table was removed or renamed while in use."""

    @abstractmethod
    def put_back(self) -> str:
        """Re-create the files of this table if one is missing, between two events, while no commit
        is under way. Returns their place; "" if all are there. Raises DlctlError and OSError.
        """

    @abstractmethod
    def _remove(self) -> None: ...
