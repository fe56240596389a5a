"""SQLite's log: what a crash leaves is taken as it is, and damage before its end is named.

The logs are SQLite's own. What SQLite itself makes of each of them is looked at beside.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from dlctl.errors import DlctlError
from dlctl.runs import database
from dlctl.runs.database import FILE, RunDb
from dlctl.runs.wal import damaged_at
from dlctl.util import processes

FRAME_BYTES = 24 + 4096
HEADER_BYTES = 32
COMMITS = 6


def log_of(directory: Path) -> bytes:
    return (directory / f"{FILE}-wal").read_bytes()


def copy(directory: Path, to: Path, log: bytes) -> Path:
    """The files of a run whose processes have gone, with this log."""
    to.mkdir()
    shutil.copy(directory / FILE, to)
    (to / f"{FILE}-wal").write_bytes(log)
    return to


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def frames(log: bytes) -> range:
    return range(HEADER_BYTES, len(log), FRAME_BYTES)


@pytest.fixture
def run(tmp_path) -> Iterator[Path]:
    """A database whose log has a few transactions of some pages each, none of them synced."""
    directory = tmp_path / "run"
    directory.mkdir()
    with closing(RunDb(directory, create=True)) as db:
        for number in range(COMMITS):
            db.put_terms({"worker-0": number})
            db.put_memory({f"key-{number}": "x" * 5000})
            db.commit()
        yield directory


def newest_term(directory: Path) -> int:
    with closing(RunDb(directory, readonly=True)) as db:
        return db.terms()["worker-0"]


def test_the_log_of_a_run_is_whole(run):
    log = log_of(run)
    assert (len(log) - HEADER_BYTES) % FRAME_BYTES == 0
    assert len(frames(log)) > 2 * COMMITS
    assert damaged_at(log, same_boot=True) is None


def test_wherever_a_log_is_cut_off_it_is_no_damage(run):
    log = log_of(run)
    cuts = {0, 1, 31, 32, 33, *(at + more for at in frames(log) for more in (0, 1, 23, 24, 4096))}
    for cut in cuts:
        assert damaged_at(log[:cut], same_boot=True) is None, cut


def test_a_bit_that_flips_before_the_last_transaction_is_found_and_would_have_cost_the_rest(
    run, tmp_path, request
):
    log, dice = log_of(run), random.Random(1)
    for number, at in enumerate(frames(log)[:-6]):
        for place in (0, 4, 8, 12, 16, 20, dice.randrange(24, FRAME_BYTES)):
            damaged = flip(log, at + place)
            assert damaged_at(damaged, same_boot=True) == at, (number, place)
    damaged = flip(log, frames(log)[-8] + 100)
    assert newest_term(copy(run, tmp_path / "damaged", damaged)) < newest_term(run), "silently"
    assert damaged_at(flip(log, 8), same_boot=True) == 0, "in the header"


def test_the_rest_of_a_transaction_that_failed_is_no_damage(run, tmp_path):
    """As on a full disk. The next one begins where it began, and may be shorter."""
    log = log_of(run)
    tails = {}
    for name, nbytes in (("short", 10), ("long", 50_000)):
        with closing(RunDb(copy(run, tmp_path / name, log))) as db:
            db.put_memory({"more": "y" * nbytes})
            db.commit()
            tails[name] = log_of(tmp_path / name)[len(log) :]
    short, failed = tails["short"], tails["long"][:-FRAME_BYTES]
    assert len(failed) > len(short) + 5 * FRAME_BYTES
    found = log + short + failed[len(short) :]
    assert damaged_at(found, same_boot=True) is None
    assert newest_term(copy(run, tmp_path / "found", found)) == COMMITS - 1


def test_what_an_older_log_has_left_behind_the_newer_one_is_no_damage(run, tmp_path):
    older = log_of(run)
    with closing(RunDb(run)) as db:
        db._db.execute("PRAGMA wal_checkpoint(RESTART)")
        db.put_terms({"worker-0": 99})
        db.commit()
        log = log_of(run)
    assert len(log) == len(older), "it is written from its beginning again"
    assert log[:HEADER_BYTES] != older[:HEADER_BYTES]
    assert damaged_at(log, same_boot=True) is None


def test_after_a_power_loss_only_what_was_synced_tells_damage_from_what_never_came_to_the_disk(run):
    at = frames(log_of(run))[1]
    assert damaged_at(flip(log_of(run), at + 50), same_boot=False) is None
    with closing(RunDb(run)) as db:
        db.sync()
        assert damaged_at(flip(log_of(run), at + 50), same_boot=False) is None, "or was to be"
        db.put_terms({"worker-0": 99})
        db.commit()
    assert damaged_at(flip(log_of(run), at + 50), same_boot=False) == at


# ---------------------------------------------------------------- databases


def test_nobody_who_would_write_opens_a_database_with_a_damaged_log(run, tmp_path):
    at = frames(log_of(run))[-8]
    log = flip(log_of(run), at + 1000)
    damaged = copy(run, tmp_path / "damaged", log)
    with pytest.raises(DlctlError, match=f"run.db-wal is damaged at byte {at:,} of") as raised:
        RunDb(damaged)
    assert raised.value.where == str(damaged / FILE)
    assert "run.db-wal is damaged" in database.damage(damaged)
    assert newest_term(damaged) < newest_term(run), "whoever reads sees what is left"
    assert log_of(damaged) == log, "as it was found: whoever closes it would hide the damage"


@pytest.mark.parametrize(("boot", "is_named"), [(processes.boot_id(), True), ("another", False)])
def test_after_a_restart_of_the_machine_the_end_of_a_log_may_be_missing(
    run, tmp_path, boot, is_named
):
    with closing(RunDb(run)) as db:
        db.put_run(pid_start=f"{boot}:1")
        db.commit()
        at = frames(log_of(run))[-1] + FRAME_BYTES
        for number in range(3):
            db.put_terms({"worker-0": COMMITS + number})
            db.commit()
        damaged = copy(run, tmp_path / "damaged", flip(log_of(run), at + 100))
    assert bool(database.damage(damaged)) == is_named
    with nullcontext() if not is_named else pytest.raises(DlctlError):
        RunDb(damaged).close()


CHANGED = [("5", "4"), ("3", "2"), ("7", "6"), ("running", "stopped"), ("x", "y")]


@pytest.mark.parametrize("table", ["run", "daemon", "checkpoint", "term", "memory"])
def test_a_value_that_is_not_what_was_written_is_not_read(run, table):
    """A bit within a value: SQLite has no checksum of its own there."""
    with closing(RunDb(run)) as db:
        db.put_run(state="running")
        db.put_daemon("worker-0", {"name": "worker-0", "incarnation": 7})
        db.put_checkpoint(3, {"number": 3})
        db.commit()
        db.check()
        value = "term" if table == "term" else "value"
        for old, new in CHANGED:
            db._db.execute(f"UPDATE {table} SET {value} = replace({value}, ?, ?)", (old, new))
        with pytest.raises(sqlite3.DatabaseError, match=f"of table {table} has a wrong checksum"):
            db.check()


@pytest.mark.parametrize(
    "name", ["a b", "%41?mode=memory#c", 'it\'s "so"', "two\nlines", "caf\udce9"]
)
def test_a_database_is_found_whatever_its_directory_is_called(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(state="running")
        db.commit()
    with closing(RunDb(directory, readonly=True)) as db:
        assert db.run()["state"] == "running"
    assert FILE in [path.name for path in directory.iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == [name]
