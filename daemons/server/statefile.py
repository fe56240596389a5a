"""The mapped file of a shard: where it is created, how it is reopened, when it is removed.

Space is allocated before the file is mapped: a write into a hole of a full file system would kill
the process with SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
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
from dlctl.shards.base import Point, Spec, Unusable, not_replaced, unusable
from dlctl.shards.image import Form, has_updates
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
        """Raises DlctlError, with place and size, if it cannot be created anywhere, and Unusable if
        a state exists that must not be replaced."""
        boot_id = kept_shards.boot_id()
        for place in self.places:
            self._remove_old(place / _file(spec), spec, boot_id)
        size_bytes = Form.of(spec, boot_id).total_bytes
        buffer = self._make_somewhere(_file(spec), size_bytes)
        self._storage = Mapped.create(buffer, spec, boot_id, self.point)
        return self._storage

    def _make_somewhere(self, name: str, size_bytes: int) -> mmap.mmap:
        for place in self.places[:-1]:
            if _has_space(place, size_bytes):
                try:
                    return self._make(place / name, size_bytes)
                except DlctlError:
                    continue  # Another server has taken the space; try the next place.
        return self._make(self.places[-1] / name, size_bytes)

    def reopen(self, spec: Spec) -> Mapped:
        """Raises Unusable, or Held while another process has it open."""
        found = "there is none"
        for place in self.places:
            path = place / _file(spec)
            try:
                self._open(path)
            except FileNotFoundError:
                continue
            if not os.fstat(self._descriptor).st_size:
                found = "it is empty"  # Its creation was interrupted; try the other places.
                continue
            try:
                buffer = _map(self._descriptor, os.fstat(self._descriptor).st_size)
                self._storage = Mapped.reopen(buffer, spec, kept_shards.boot_id(), self.point)
                return self._storage
            except Unusable as error:
                raise unusable(spec, error, str(path)) from error
        where = " or ".join(str(place / _file(spec)) for place in self.places)
        raise unusable(spec, Unusable(found), where)

    def _remove(self) -> None:
        self._storage = None
        if self._path is None:
            return
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # The directory may still have files of other shards.
            self._path.parent.rmdir()

    # ------------------------------------------------------------ files that were removed

    def is_missing(self) -> bool:
        if self._storage is None or self._path is None:
            return False
        return not is_there(self._path, self._descriptor)

    def put_back(self) -> str:
        """Re-create the file at the same path."""
        assert self._storage is not None
        assert self._path is not None
        path, size_bytes = self._path, self._storage.size_bytes
        own_directory(path.parent)
        descriptor = open_locked(path, NEW)
        try:
            _set_aside(path, descriptor, size_bytes)
            buffer = _map(descriptor, size_bytes)
        except (DlctlError, OSError):
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._storage.move(buffer)
        self._close()
        self._path, self._descriptor = path, descriptor
        return str(path)

    # ------------------------------------------------------------ files

    def _make(self, path: Path, size_bytes: int) -> mmap.mmap:
        own_directory(path.parent)
        self._open(path, os.O_CREAT)
        try:
            _set_aside(path, self._descriptor, size_bytes)
        except DlctlError:
            self._remove()
            self._close()
            raise
        return _map(self._descriptor, size_bytes)

    def _open(self, path: Path, flags: int = 0) -> None:
        self._close()
        self._descriptor = open_locked(path, flags)
        self._path = path

    def _close(self) -> None:
        if self._descriptor >= 0:
            # Unlock explicitly: a mapping keeps the file, and so the lock, after the close.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _remove_old(self, path: Path, spec: Spec, boot_id: str) -> None:
        """Remove the file of an earlier server, so that it is not found instead of the new one.

        Raises Unusable if it has updates, which must not be lost.
        """
        try:
            self._open(path)
        except FileNotFoundError:
            return
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes:
            buffer = mmap.mmap(self._descriptor, size_bytes, access=mmap.ACCESS_READ)
            if has_updates(buffer, spec, boot_id):
                self._close()
                raise not_replaced(spec, str(path))
        self._remove()
        self._close()


def _file(spec: Spec) -> str:
    return f"shard-{spec.place}.state"


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    if not size_bytes:
        raise Unusable("it is empty")
    # Populate all pages now: page faults would make the first updates slow.
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _set_aside(path: Path, descriptor: int, size_bytes: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise failure("set aside the state", path, error, size_bytes) from error


def _has_space(place: Path, size_bytes: int) -> bool:
    """Whether a file system has space for a state, with a margin. Checks the nearest parent."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        info = os.statvfs(place)
    except OSError:
        return False
    return info.f_bavail * info.f_frsize >= size_bytes * 5 // 4 + MARGIN_BYTES
