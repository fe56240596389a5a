"""The mapped file of a shard: where it is made, how it is found again, when it goes.

Space is set aside before the file is mapped: to write into a hole of a full file system would end
the process with SIGBUS, without a word.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from daemons.server.files import failure, open_locked, own_directory
from dlctl import states
from dlctl.errors import DlctlError
from dlctl.shards.base import Point, Spec, Unusable, unusable
from dlctl.shards.image import Form
from dlctl.shards.mapped import Mapped

MARGIN_BYTES = 16 * 2**20
"""What must stay free in shared memory; others live there, too."""


class StateFile:
    """`Storages` of one server, in the first place that has room."""

    def __init__(self, places: list[Path], point: Point) -> None:
        """`places`: directories, the preferred one first; the last one is taken in any case."""
        self.places = places
        self.point = point
        self._path: Path | None = None
        self._descriptor = -1

    def create(self, spec: Spec) -> Mapped:
        """Raises DlctlError, with place and size, if it cannot be made anywhere."""
        for place in self.places:
            self._remove_old(place / _file(spec))
        boot_id = states.boot_id()
        size_bytes = Form.of(spec, boot_id).total_bytes
        for place in self.places[:-1]:
            if _has_room(place, size_bytes):
                try:
                    return Mapped.create(
                        self._make(place / _file(spec), size_bytes), spec, boot_id, self.point
                    )
                except DlctlError:
                    continue  # Another server was faster than we; there is one more place.
        path = self.places[-1] / _file(spec)
        return Mapped.create(self._make(path, size_bytes), spec, boot_id, self.point)

    def reopen(self, spec: Spec) -> Mapped:
        """Raises Unusable, or Held while another process has it open."""
        for place in self.places:
            path = place / _file(spec)
            try:
                self._open(path, create=False)
            except FileNotFoundError:
                continue
            try:
                buffer = self._map(os.fstat(self._descriptor).st_size)
                return Mapped.reopen(buffer, spec, states.boot_id(), self.point)
            except Unusable as error:
                raise unusable(spec, error, str(path)) from error
        where = " or ".join(str(place / _file(spec)) for place in self.places)
        raise unusable(spec, Unusable("there is none"), where)

    def discard(self) -> None:
        """Remove the file, and its directory with the last one."""
        if self._path is None:
            return
        self._path.unlink(missing_ok=True)
        try:
            self._path.parent.rmdir()
        except OSError:
            return  # Other shards are still there.

    # ------------------------------------------------------------ files

    def _make(self, path: Path, size_bytes: int) -> mmap.mmap:
        own_directory(path.parent)
        self._open(path, create=True)
        try:
            os.ftruncate(self._descriptor, 0)
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            self.discard()
            self._close()
            raise failure("set aside the state", path, error, size_bytes) from error
        return self._map(size_bytes)

    def _open(self, path: Path, *, create: bool) -> None:
        self._close()
        self._descriptor = open_locked(path, create=create)
        self._path = path

    def _close(self) -> None:
        if self._descriptor >= 0:
            # A mapping keeps its file open, and with it the lock, longer than the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _map(self, size_bytes: int) -> mmap.mmap:
        if not size_bytes:
            raise Unusable("it is empty")
        # All pages at once: one by one, they would make the first updates slow.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self._descriptor, size_bytes, flags=flags)

    def _remove_old(self, path: Path) -> None:
        """Whatever an earlier server has left must not be found instead of the new one."""
        try:
            self._open(path, create=False)
        except FileNotFoundError:
            return
        self.discard()
        self._close()


def _file(spec: Spec) -> str:
    return f"shard-{spec.shard}.state"


def _has_room(place: Path, size_bytes: int) -> bool:
    """Whether a file system has room for a state, with a margin. Asked of the nearest parent."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        info = os.statvfs(place)
    except OSError:
        return False
    return info.f_bavail * info.f_frsize >= size_bytes * 5 // 4 + MARGIN_BYTES
