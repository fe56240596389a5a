"""The log of a shard on a disk: `durability = "disk"`. A completed commit survives a power loss.

After a failed write or fsync the content on the disk is unknown, and a later fsync of the same file
may wrongly succeed. So a failed commit ends the server, and the next server reads the files. After
a failed `put_back` the next commit writes everything to new files.

A thread writes the commits (`committing.py`). `put_back`, `discard` and the end of the server come
between two commits, when that thread has nothing to do.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from daemons.server.files import (
    NEW,
    TablesInFiles,
    failure,
    is_there,
    open_locked,
    own_directory,
)
from dlctl.errors import DlctlError, os_errors_as
from dlctl.shards.base import Spec
from dlctl.shards.journal_format import Bytes
from dlctl.shards.journaled import Journaled
from dlctl.shards.log import Point
from dlctl.util import regular
from dlctl.util.fsync import sync_directory

UNREADABLE = "cannot read the state"
MARGIN_BYTES = 1 << 20
"""Free space that a new base must leave, for the records of other processes on the same disk."""


class DiskLog(TablesInFiles):
    """`Storages` of one server on a disk, and the `Log` of its shard; holds the lock of the shard
    from `open` to `close`.
    """

    def __init__(self, places: list[Path], point: Point) -> None:
        """`places`: only the first is used."""
        super().__init__(places, point)
        self.directory = places[0]
        self.where = str(places[0])
        self.shard = ""
        self._lock = self._journal = -1
        self._lock_path = self._base_path = self._journal_path = self.directory
        self._storage: Journaled | None = None

    def create(self, spec: Spec) -> Journaled:
        """Create the log of a shard. Raises DlctlError, with path and size, if it cannot be
        written, and Unusable if a state exists that must not be replaced.
        """
        self.open(spec)
        self._storage = Journaled.create(self, spec, self.point)
        return self._storage

    def reopen(self, spec: Spec) -> Journaled:
        """Open an existing log. Raises Held while another process has it open, NoRoom if there is
        no space to rewrite it; `resume` reports an unusable state.
        """
        self._storage = None  # An earlier attempt's: memory may not hold both.
        self.open(spec)
        self.check_space(spec.vector_bytes)
        self._storage = Journaled(self, spec, self.point)
        return self._storage

    def open(self, spec: Spec) -> None:
        """Open the log of a shard. Raises DlctlError, or Held if another process has it."""
        self.close()  # An earlier attempt may have found no space.
        own_directory(self.directory)
        self.shard = spec.place
        self._lock_path = self.directory / f"shard-{self.shard}.lock"
        self._lock = open_locked(self._lock_path, os.O_CREAT)
        for path in self.directory.glob(f"shard-{self.shard}.base-*.tmp"):
            with suppress(OSError):  # A process that died has left it: a new one needs the space.
                path.unlink()

    def _path(self, kind: str, number: int) -> Path:
        return self.directory / f"shard-{self.shard}.{kind}-{number:012d}"

    def _paths(self, kind: str) -> list[Path]:
        return sorted(self.directory.glob(f"shard-{self.shard}.{kind}-*"))

    # ------------------------------------------------------------ reading

    def bases(self) -> list[int]:
        numbers = (path.name.rpartition("-")[2] for path in self._paths("base"))
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def read_base(self, number: int) -> bytes:
        return _read(self._path("base", number))

    def read_journal(self, number: int) -> Iterator[bytes]:
        path = self._path("journal", number)
        if path.exists():
            with os_errors_as(UNREADABLE, path):
                yield from regular.pieces(path)

    # ------------------------------------------------------------ writing

    def check_space(self, size_bytes: int) -> None:
        """Raises NoRoom if a base of this size would leave less than `MARGIN_BYTES` free, and
        DlctlError if the free space is unknown."""
        try:
            if shutil.disk_usage(self.directory).free < size_bytes + MARGIN_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise failure("write the state", self.directory, error, size_bytes) from error

    def begin(self, number: int, parts: Sequence[Bytes]) -> None:
        base, journal = self._path("base", number), self._path("journal", number)
        size_bytes = sum(map(len, parts))
        self.check_space(size_bytes)
        unfinished = base.with_name(base.name + ".tmp")
        begun = -1
        try:
            begun = _create(journal, [])
            os.close(_create(unfinished, parts))
        except OSError as error:  # Restore the previous state, and free the space.
            if begun >= 0:
                os.close(begun)
            for path in (unfinished, journal):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise failure("write the state", base, error, size_bytes) from error
        # From here on the next process may find this base: the old journal must not grow any more.
        self._use(begun, journal, base)
        try:
            unfinished.replace(base)
            sync_directory(self.directory)
        except OSError as error:
            self._use(-1, journal, base)
            raise failure("write the state", base, error, size_bytes) from error
        self._remove_old(number)

    def _remove_old(self, number: int) -> None:
        """Remove all but the newest, the bases first: a base that a reader finds still has its
        journal. A file that cannot be removed is harmless."""
        for old in [*self._paths("base"), *self._paths("journal")]:
            if old.name.rpartition("-")[2] != f"{number:012d}":
                with suppress(OSError):
                    old.unlink()

    def _use(self, descriptor: int, journal: Path, base: Path) -> None:
        """Append records there from now on; -1: nowhere."""
        if self._journal >= 0:
            os.close(self._journal)
        self._journal, self._journal_path, self._base_path = descriptor, journal, base

    def append(self, parts: Sequence[Bytes]) -> None:
        if self._journal < 0:
            why = "cannot write to the journal: an earlier write has failed"
            raise DlctlError(why, where=str(self._journal_path))
        try:
            _write(self._journal, parts)
            self.point("journal written")
            os.fdatasync(self._journal)
        except OSError as error:
            # Part of a record may be there, and nothing that follows it would be found.
            self._use(-1, self._journal_path, self._base_path)
            raise failure("write to the journal", self._journal_path, error) from error

    # ------------------------------------------------------------ files that were removed

    def is_missing(self) -> bool:
        if self._storage is None or self._journal < 0:
            return False
        is_locked = is_there(self._lock_path, self._lock)
        is_whole = is_there(self._journal_path, self._journal) and self._base_path.exists()
        return not (is_locked and is_whole)

    def put_back(self) -> str:
        if self._storage is None or not self.is_missing():
            return ""
        own_directory(self.directory)
        if not is_there(self._lock_path, self._lock):
            lock = open_locked(self._lock_path, NEW)
            os.close(self._lock)
            self._lock = lock
        self._storage.rewrite()
        return self.where

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Release the lock for another process, as the exit of this one would."""
        for descriptor in (self._journal, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal = self._lock = -1

    def _remove(self) -> None:
        self._storage = None
        if self._lock < 0:
            return
        for path in self.directory.glob(f"shard-{self.shard}.*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # The directory may still have files of other shards.
            self.directory.rmdir()


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


def _create(path: Path, parts: Sequence[Bytes]) -> int:
    """A new file with this content, on the disk; returns its descriptor, for appending."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, _CREATE, 0o600)
    try:
        _write(descriptor, parts)
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, parts: Sequence[Bytes]) -> None:
    """Write everything, also if the kernel accepts only a part at a time."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def _read(path: Path) -> bytes:
    with os_errors_as(UNREADABLE, path):
        return regular.read_bytes(path)
