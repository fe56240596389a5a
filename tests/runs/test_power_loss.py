"""Power is lost at any moment while a checkpoint is made: the newest good one is always there.

The disk is a strict one. It has of every file what was in it when that was synced last, and of
every directory the names of when that was synced last; beside each such picture there is one with
the names that are there now, for a disk may write more than it was asked to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_checkpoints import save

from dlctl.runs import checkpoints, lineage


class Disk:
    """What would be found after a power loss, kept whenever something is synced."""

    def __init__(self, root: Path, pictures: Path) -> None:
        self.root, self.taken = root, 0
        self._pictures = pictures
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._is_directory: dict[int, bool] = {}
        self._held: dict[int, int] = {}
        """Descriptors: an inode that is open is not given to a new file when its own is removed."""

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def synced(self, path: Path) -> None:
        """Everything that was asked for of this file or directory is on the disk now."""
        inode = self._hold(path)
        if path.is_dir():
            self._names[inode] = self._entries(path)
        else:
            self._contents[inode] = path.read_bytes()

    def _entries(self, path: Path) -> dict[str, int]:
        return {entry.name: self._hold(path / entry.name) for entry in os.scandir(path)}

    def _hold(self, path: Path) -> int:
        descriptor = os.open(path, os.O_PATH)
        inode = os.fstat(descriptor).st_ino
        if self._held.setdefault(inode, descriptor) != descriptor:
            os.close(descriptor)
        self._is_directory[inode] = path.is_dir()
        return inode

    def pictures(self) -> list[Path]:
        made = []
        for now in (False, True):
            self.taken += 1
            to = self._pictures / f"{self.taken}"
            self._draw(self.root if now else None, self.root.stat().st_ino, to)
            made.append(to)
        return made

    def _draw(self, now: Path | None, inode: int, to: Path) -> None:
        """`now`: draw with the names that this directory has now."""
        to.mkdir(parents=True)
        names = self._names.get(inode, {}) if now is None else self._entries(now)
        for name, of in names.items():
            if self._is_directory[of]:
                self._draw(None if now is None else now / name, of, to / name)
            else:
                (to / name).write_bytes(self._contents.get(of, b""))


@pytest.fixture
def look(tmp_path, monkeypatch) -> Iterator[Callable[[Path, list[int]], Disk]]:
    """Have every picture be looked at: the newest good checkpoint is at least of this number."""

    def begin(run: Path, least: list[int]) -> Disk:
        disk, real = Disk(run.parent, tmp_path / "pictures"), os.fsync

        def check() -> None:
            for picture in disk.pictures():
                good = lineage.newest_good(picture / run.name)
                found = checkpoints.number(good[0])[0] if good else 0
                assert found >= least[0], (found, sorted(picture.rglob("*")))
                shutil.rmtree(picture)

        def sync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not path.is_relative_to(run.parent):  # Who looks at a picture may write into it.
                return real(descriptor)
            check()
            real(descriptor)
            disk.synced(path)
            return check()

        monkeypatch.setattr(os, "fsync", sync)
        held.callback(disk.close)
        return disk

    with ExitStack() as held:
        yield begin


def test_whenever_power_is_lost_the_newest_good_checkpoint_is_there(tmp_path, look):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    least = [0]
    disk = look(run, least)
    for number in (1, 2, 3, 4):
        directory = save(run, step=number, number=number)
        least[0] = number
        disk.pictures()
        for old in lineage.superfluous(run, [], keep=2, good=directory):
            checkpoints.remove(old)
    assert disk.taken > 100


def test_what_was_removed_and_might_be_found_has_nothing_of_what_came_after_it(tmp_path):
    """A file system gives the inodes of what was removed to what is made next."""
    root = tmp_path / "root"
    old, new = root / "old", root / "new"
    old.mkdir(parents=True)
    disk = Disk(root, tmp_path / "pictures")
    for path in (old / "file", old, root):
        if not path.is_dir():
            path.write_bytes(b"before")
        disk.synced(path)
    shutil.rmtree(old)
    new.mkdir()
    (new / "file").write_bytes(b"after")
    disk.synced(new / "file")
    disk.synced(root)
    names_synced, names_now = disk.pictures()
    disk.close()
    assert list((names_synced / "new").iterdir()) == []
    assert (names_now / "new" / "file").read_bytes() == b"after"
