"""Power is lost at any moment while a checkpoint is made: the newest good one is always there.

The disk is a strict one. It has of every file what was in it when that was synced last, and of
every directory the names of when that was synced last; beside each such picture there is one with
the names that are there now, for a disk may write more than it was asked to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_checkpoints import save

from dlctl import checkpoints


class Disk:
    """What would be found after a power loss, kept whenever something is synced."""

    def __init__(self, root: Path, pictures: Path) -> None:
        self.root, self.taken = root, 0
        self._pictures = pictures
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._is_directory: dict[int, bool] = {}

    def synced(self, descriptor: int) -> None:
        """Everything that was asked for of this file or directory is on the disk now."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._names[inode] = self._entries(path)
        else:
            self._contents[inode] = path.read_bytes()

    def _entries(self, path: Path) -> dict[str, int]:
        found = {entry.name: entry.inode() for entry in os.scandir(path)}
        self._is_directory |= {e.inode(): e.is_dir() for e in os.scandir(path)}
        return found

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
def look(tmp_path, monkeypatch) -> Callable[[int], Disk]:
    """Have every picture be looked at: the newest good checkpoint is at least of this number."""

    def begin(run: Path, least: list[int]) -> Disk:
        disk, real = Disk(run.parent, tmp_path / "pictures"), os.fsync

        def check() -> None:
            for picture in disk.pictures():
                good = checkpoints.newest_good(picture / run.name)
                found = checkpoints.number(good[0])[0] if good else 0
                assert found >= least[0], (found, sorted(picture.rglob("*")))
                shutil.rmtree(picture)

        def sync(descriptor: int) -> None:
            check()
            real(descriptor)
            disk.synced(descriptor)
            check()

        monkeypatch.setattr(os, "fsync", sync)
        return disk

    return begin


def test_whenever_power_is_lost_the_newest_good_checkpoint_is_there(tmp_path, look):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    least = [0]
    disk = look(run, least)
    for number in (1, 2, 3, 4):
        directory = save(run, step=number, number=number)
        least[0] = number
        disk.pictures()
        checkpoints.prune(run, keep=2, trusted=directory)
    assert disk.taken > 100
