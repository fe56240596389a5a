"""The file of terms: what a crash or a power loss leaves of it, and what damage is."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_power_loss import Disk

from dlctl.errors import DlctlError
from dlctl.runs import terms
from dlctl.runs.database import FILE, RunDb
from dlctl.runs.terms import OnDisk, TermLog, in_lines
from dlctl.sim.store import TermsFile


def written(*issued: dict[str, int]) -> bytes:
    """A line for each of these."""
    file = TermsFile()
    writer = TermLog(file)
    for line in issued:
        for name, term in line.items():
            writer.issue(name, term)
        writer.append()
    return file.data


THREE = written({"worker-0": 1, "server-0": 1}, {"worker-0": 2}, {"worker-1": 1})


def test_the_file_is_as_it_is_documented() -> None:
    assert THREE.splitlines()[:2] == [b"server-0=1 worker-0=1 e845f925", b"worker-0=2 63152039"]
    assert in_lines(THREE) == ({"server-0": 1, "worker-0": 2, "worker-1": 1}, len(THREE))


def test_wherever_the_last_line_is_torn_it_does_not_count_and_the_others_do() -> None:
    whole = THREE.rindex(b"\n", 0, -1) + 1
    known = {"server-0": 1, "worker-0": 2}
    for cut in range(whole, len(THREE)):
        assert in_lines(THREE[:cut]) == (known, whole)
        assert in_lines(THREE[:cut] + bytes(4096)) == (known, whole), "a hole in the file"
        assert in_lines(THREE[:cut] + b"\0" + THREE[cut + 1 :]) == (known, whole)


def test_every_bit_that_flips_before_the_last_line_is_damage() -> None:
    whole = THREE.rindex(b"\n", 0, -1) + 1
    for at in range(whole):
        for bit in range(8):
            damaged = THREE[:at] + bytes([THREE[at] ^ (1 << bit)]) + THREE[at + 1 :]
            with pytest.raises(ValueError, match="written"):
                in_lines(damaged)


def test_zeros_in_front_of_the_last_line_are_damage_wherever_they_begin_and_end() -> None:
    """Also in the place of newlines: a whole line is never a part of one that was torn."""
    whole = THREE.rindex(b"\n", 0, -1) + 1
    for begin in range(whole):
        for end in range(begin + 1, whole + 1):
            for last in (THREE[end:], THREE[end:-1]):
                with pytest.raises(ValueError, match="is not what was written"):
                    in_lines(THREE[:begin] + bytes(end - begin) + last)


def test_a_line_that_was_appended_behind_zeros_is_not_dropped_with_them() -> None:
    with pytest.raises(ValueError, match="line 4 of terms is not what was written"):
        in_lines(THREE + b"worker-1=2 wor" + bytes(40) + written({"worker-1": 7}))


def test_zeros_behind_the_last_whole_line_are_a_torn_one() -> None:
    assert in_lines(THREE + bytes(4096)) == in_lines(THREE)
    assert in_lines(THREE + bytes(10) + b"5 67b9f769\n") == in_lines(THREE)


def test_the_next_line_takes_the_place_of_a_torn_one() -> None:
    file = TermsFile(THREE + b"worker-1=2 wor")
    writer = TermLog(file)
    writer.issue("worker-1", 7)
    writer.append()
    assert file.data == THREE + written({"worker-1": 7})


def test_what_is_known_from_elsewhere_is_appended_once_if_it_is_newer() -> None:
    file = TermsFile(THREE)
    for _ in range(2):
        TermLog(file, {"worker-0": 1, "worker-1": 5, "server-9": 0}).append()
    assert file.data == THREE + written({"worker-1": 5, "server-9": 0})


class Failing(TermsFile):
    """A disk that does not do everything that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: str = ""

    def write(self, at: int, data: bytes) -> None:
        super().write(at, data[: len(data) // 2] if self.fails == "write" else data)
        if self.fails == "write":
            raise OSError(errno.ENOSPC, "no space")

    def sync(self) -> None:
        if self.fails == "sync":
            raise OSError(errno.EIO, "input/output error")
        super().sync()


@pytest.mark.parametrize("fails", ["write", "sync"])
def test_an_attempt_that_fails_leaves_nothing_behind_and_is_made_again(fails: str) -> None:
    file = Failing()
    writer = TermLog(file)
    writer.issue("worker-0", 1)
    writer.append()
    file.fails = fails
    writer.issue("a-name-that-is-longer-0", 10**9)
    for _ in range(2):
        with pytest.raises(OSError, match=r"space|input"):
            writer.append()
        assert not writer.is_synced
    file.lose()
    assert in_lines(file.data)[0] == {"worker-0": 1}
    file.fails = ""
    writer.issue("worker-0", 2)
    writer.append()
    assert writer.is_synced
    file.lose()
    assert in_lines(file.data)[0] == {"worker-0": 2, "a-name-that-is-longer-0": 10**9}


class Cached(TermsFile):
    """A disk behind the memory of an operating system: after a sync that fails, pages that were not
    written are still read, and written only if somebody writes to them again.
    """

    PAGE = 8

    def __init__(self) -> None:
        super().__init__()
        self._dirty: set[int] = set()
        self._pages: dict[int, bytes] = {}
        self.fails = False

    def write(self, at: int, data: bytes) -> None:
        super().write(at, data)
        self._touch(at, len(data))

    def write_again(self, at: int, data: bytes) -> None:
        super().write_again(at, data)
        self._touch(at, len(data))

    def _touch(self, at: int, count: int) -> None:
        self._dirty |= {place // self.PAGE for place in range(at, at + count)}

    def sync(self) -> None:
        dirty, self._dirty = self._dirty, set()
        if self.fails:
            raise OSError(errno.EIO, "input/output error")
        for page in dirty:
            self._pages[page] = self.data[page * self.PAGE : (page + 1) * self.PAGE]

    def after_a_power_loss(self) -> bytes:
        numbers = range(-(-len(self.data) // self.PAGE))
        pages = [self._pages.get(page, b"").ljust(self.PAGE, b"\0") for page in numbers]
        return b"".join(pages)[: len(self.data)]


def test_whoever_dies_after_a_sync_that_failed_leaves_no_line_that_tears_later() -> None:
    """Each of six coordinators reads what is in memory, issues a term, and dies."""
    for fails in itertools.product([False, True], repeat=6):
        file, issued = Cached(), 0
        for file.fails in fails:
            term = in_lines(file.read())[0].get("worker-0", 0) + 1
            writer = TermLog(file)
            writer.issue("worker-0", term)
            with suppress(OSError):
                writer.append()
                issued = term
            left, _ = in_lines(file.after_a_power_loss())
            assert left.get("worker-0", 0) >= issued, fails


# ---------------------------------------------------------------- on a disk


@contextmanager
def cannot_grow(path: Path, more: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("more", [0, 5])
def test_a_full_disk_takes_a_line_once_it_has_room_again(tmp_path: Path, more: int) -> None:
    """Part of it may have been written."""
    with closing(OnDisk(tmp_path)) as file:
        writer = TermLog(file)
        writer.issue("worker-0", 1)
        writer.append()
        writer.issue("worker-0", 2)
        with cannot_grow(tmp_path / terms.FILE, more):
            for _ in range(2):
                with pytest.raises(OSError, match=r"large|space"):
                    writer.append()
                assert in_lines(file.read())[0] == {"worker-0": 1}
        writer.append()
    assert (tmp_path / terms.FILE).read_bytes() == written({"worker-0": 1}, {"worker-0": 2})


def test_whenever_power_is_lost_a_term_that_was_issued_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name in the directory included."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    disk, real = Disk(run, tmp_path / "pictures"), os.fsync

    def sync(descriptor: int) -> None:
        real(descriptor)
        disk.synced(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", sync)
    with closing(OnDisk(run)) as file, closing(disk):
        writer = TermLog(file)
        for term in range(1, 6):
            writer.issue("worker-0", term)
            writer.append()
            for picture in disk.pictures():
                data = OnDisk(picture).read()
                assert in_lines(data) == ({"worker-0": term}, len(data))


def test_a_new_process_writes_and_syncs_the_last_line_before_it_appends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / terms.FILE
    path.write_bytes(THREE + b"worker-1=2 wor")
    done: list[Any] = []
    write, sync = os.pwrite, os.fsync

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        done.append((at, data))
        return write(descriptor, data, at)

    def fsync(descriptor: int) -> None:
        done.append(path.read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    with closing(OnDisk(tmp_path)) as file:
        writer = TermLog(file)
        writer.issue("worker-1", 7)
        writer.append()
    last, new = written({"worker-1": 1}), written({"worker-1": 7})
    assert list(dict.fromkeys(done)) == [
        (len(THREE) - len(last), last),
        THREE + b"worker-1=2 wor",
        (len(THREE), new),
        THREE + new,
    ]


def old_run(directory: Path, old_terms: dict[str, int]) -> RunDb:
    """A database of an earlier version, which has the terms in a table."""
    RunDb(directory, create=True).close()
    with closing(sqlite3.connect(directory / FILE)) as db:
        db.execute("CREATE TABLE term (name TEXT PRIMARY KEY, term INTEGER, crc INTEGER)")
        db.commit()
    db = RunDb(directory)
    db._put("term", old_terms)
    db.commit()
    return db


def test_the_terms_of_an_old_run_are_carried_over(tmp_path: Path) -> None:
    with closing(old_run(tmp_path, {"worker-0": 4, "server-0": 2})) as db:
        assert terms.newest(tmp_path, db) == {"worker-0": 4, "server-0": 2}
        with closing(OnDisk(tmp_path)) as file:
            writer = TermLog(file, terms.newest(tmp_path, db))
            writer.issue("worker-0", 5)
            writer.append()
            assert in_lines(file.read())[0] == {"worker-0": 5, "server-0": 2}
        assert terms.newest(tmp_path, db) == {"worker-0": 5, "server-0": 2}
        db._db.execute("UPDATE term SET term = term + 1")
        with pytest.raises(sqlite3.DatabaseError, match=" term "):
            db.check()


def test_an_old_database_that_somebody_restores_takes_no_term_back(tmp_path: Path) -> None:
    with closing(RunDb(tmp_path, create=True)) as db, closing(OnDisk(tmp_path)) as file:
        db.put_memory({"daemon/worker-0": {"term": 3}})
        db.commit()
        writer = TermLog(file)
        writer.issue("worker-0", 9)
        writer.append()
        assert terms.newest(tmp_path, db) == {"worker-0": 9}


def test_a_last_line_that_is_damaged_costs_no_term_that_a_daemon_has(tmp_path: Path) -> None:
    """It looks torn. Its terms were remembered before they were sent."""
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_memory({"daemon/worker-0": {"term": 9}, "daemon/worker-1": {}, "run": []})
        db.commit()
        (tmp_path / terms.FILE).write_bytes(written({"worker-0": 8}, {"worker-0": 9})[:-3])
        assert terms.newest(tmp_path, db) == {"worker-0": 9}


def test_terms_that_are_only_remembered_are_in_the_file_before_the_memory_is_cleared(
    tmp_path: Path,
) -> None:
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_memory({"daemon/worker-0": {"term": 9}})
        (tmp_path / terms.FILE).write_bytes(THREE + b"worker-0=9 wor")
        terms.carry_over(tmp_path, db)
        db.clear_memory()
        assert terms.newest(tmp_path, db) == {**in_lines(THREE)[0], "worker-0": 9}


def _as_directory(path: Path) -> None:
    path.mkdir()


def _damaged(path: Path) -> None:
    path.write_bytes(b"x" + THREE)


@pytest.mark.parametrize("how", [_as_directory, _damaged])
def test_no_term_is_issued_from_a_file_that_cannot_be_read(
    tmp_path: Path, how: Callable[[Path], None]
) -> None:
    how(tmp_path / terms.FILE)
    with pytest.raises(DlctlError, match="terms"):
        TermLog(OnDisk(tmp_path))
    assert terms.damage(tmp_path)
    with closing(RunDb(tmp_path, create=True)) as db, pytest.raises(DlctlError) as raised:
        terms.newest(tmp_path, db)
    assert raised.value.where == str(tmp_path / terms.FILE)
    assert raised.value.hint is not None


def test_what_is_no_file_of_terms_is_read_in_no_time_and_named_or_torn() -> None:
    draw = random.Random(3)
    for _ in range(300):
        data = draw.randbytes(draw.randrange(200))
        with suppress(ValueError):
            assert in_lines(data) == ({}, 0)
