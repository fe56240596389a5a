"""The mapped file of a shard: where it is created, how it is reopened, when it is removed.

Space is allocated before the file is mapped: a write into a hole of a full file system would kill
the process with SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
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
from dlctl.errors import DlctlError
from dlctl.runs import kept_shards
from dlctl.shards.base import Spec, not_replaced, unusable
from dlctl.shards.errors import Unusable
from dlctl.shards.image import ImageForm, has_updates
from dlctl.shards.log import Point
from dlctl.shards.mapped import Mapped

MARGIN_BYTES = 16 * 2**20
"""Space that must stay free in shared memory, for other processes."""


class StateFile(TablesInFiles):
    """`Storages` of one server, in the first place with enough space."""

    def __init__(self, places: list[Path], point: Point) -> None:
        """`places`: the last one is used in any case."""
        super().__init__(places, point)
        self._path: Path | None = None
        self._descriptor = -1
        self._storage: Mapped | None = None

    def create(self, spec: Spec) -> Mapped:
        """Create the mapped file of a shard. Raises DlctlError, with place and size, if it cannot
        be created anywhere, and Unusable if a state exists that must not be replaced.
        """
        boot_id = kept_shards.boot_id()
        # The file of an earlier server must not be found instead of the new one.
        for path, old_bytes in self._open_each(spec):
            # Not stored: a mapping would keep the space of the removed file.
            is_known = not spec.replaces and old_bytes
            if is_known and has_updates(
                mmap.mmap(self._descriptor, old_bytes, access=mmap.ACCESS_READ), spec, boot_id
            ):
                self._close()
                raise not_replaced(spec, str(path))
            self._remove()
            self._close()
        size_bytes = ImageForm.of(spec, boot_id).total_bytes
        self._path, self._descriptor, buffer = _make_somewhere(self._paths(spec), size_bytes)
        self._storage = Mapped.create(buffer, spec, boot_id, self.point)
        return self._storage

    def reopen(self, spec: Spec) -> Mapped:
        """Open an existing file. Raises Unusable, or Held while another process has it open."""
        problem = "there is none"
        for path, size_bytes in self._open_each(spec):
            if not size_bytes:
                problem = "it is empty"  # Its creation was interrupted; try the other places.
                continue
            try:
                buffer = _map(self._descriptor, size_bytes)
                self._storage = Mapped.reopen(buffer, spec, kept_shards.boot_id(), self.point)
                return self._storage
            except Unusable as error:
                raise unusable(spec, error, str(path)) from error
        where = " or ".join(map(str, self._paths(spec)))
        raise unusable(spec, Unusable(problem), where)

    def _paths(self, spec: Spec) -> list[Path]:
        return [place / f"shard-{spec.place}.state" for place in self.places]

    def _open_each(self, spec: Spec) -> Iterator[tuple[Path, int]]:
        """Open the existing files of this shard, one after another: path and size."""
        for path in self._paths(spec):
            self._close()
            with suppress(FileNotFoundError):
                self._path, self._descriptor = path, open_locked(path)
                yield path, os.fstat(self._descriptor).st_size

    def _remove(self) -> None:
        self._storage = None
        if self._path is not None:
            _unlink(self._path)

    def _close(self) -> None:
        if self._descriptor >= 0:
            # Unlock explicitly: a mapping keeps the file, and so the lock, after the close.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    # ------------------------------------------------------------ files that were removed

    def is_missing(self) -> bool:
        path = self._path
        return (
            self._storage is not None and path is not None and not is_there(path, self._descriptor)
        )

    def put_back(self) -> str:
        path = self._path
        if self._storage is None or path is None or not self.is_missing():
            return ""
        descriptor, buffer = _make(path, self._storage.size_bytes, NEW)
        self._storage.move(buffer)
        self._close()
        self._path, self._descriptor = path, descriptor
        return str(path)


# ---------------------------------------------------------------- files


def _make_somewhere(paths: list[Path], size_bytes: int) -> tuple[Path, int, mmap.mmap]:
    """`_make` in the first place with enough space, or the last one."""
    for path in paths[:-1]:
        if _has_space(path.parent, size_bytes):
            with suppress(DlctlError):  # Another server has taken the space; try the next place.
                return path, *_make(path, size_bytes, os.O_CREAT)
    return paths[-1], *_make(paths[-1], size_bytes, os.O_CREAT)


def _make(path: Path, size_bytes: int, flags: int) -> tuple[int, mmap.mmap]:
    """A new file, locked, with all its space: its descriptor, and its mapping. Raises DlctlError;
    then there is no file."""
    own_directory(path.parent)
    descriptor = open_locked(path, flags)
    try:
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size_bytes)
        return descriptor, _map(descriptor, size_bytes)
    except OSError as error:
        _unlink(path)
        os.close(descriptor)
        raise failure("set aside the state", path, error, size_bytes) from error


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    with suppress(OSError):  # The directory may still have files of other shards.
        path.parent.rmdir()


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    # Populate all pages now: page faults would make the first updates slow.
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _has_space(place: Path, size_bytes: int) -> bool:
    """Whether a file system has space for a state, with a margin. Checks the nearest parent."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        info = os.statvfs(place)
    except OSError:
        return False
    return info.f_bavail * info.f_frsize >= size_bytes * 5 // 4 + MARGIN_BYTES
