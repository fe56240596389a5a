"""The run's database: rows with checksums, and names of directories that a URI would spoil."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dlctl.runs.database import FILE, RunDb

CHANGED = [("5", "4"), ("3", "2"), ("7", "6"), ("running", "stopped"), ("x", "y")]


@pytest.mark.parametrize("table", ["run", "daemon", "checkpoint", "memory"])
def test_a_value_that_is_not_what_was_written_is_not_read(tmp_path: Path, table: str) -> None:
    """A bit within a value: SQLite has no checksum of its own there."""
    with closing(RunDb(tmp_path, create=True)) as db:
        db.put_run(state="running")
        db.put_daemon("worker-0", {"name": "worker-0", "incarnation": 7})
        db.put_checkpoint(3, {"number": 3})
        db.put_memory({"key": "x" * 5000})
        db.commit()
        db.check()
        for old, new in CHANGED:
            db._db.execute(f"UPDATE {table} SET value = replace(value, ?, ?)", (old, new))
        with pytest.raises(sqlite3.DatabaseError, match=f" {table} "):
            db.check()


@pytest.mark.parametrize(
    "name", ["a b", "%41?mode=memory#c", 'it\'s "so"', "two\nlines", "caf\udce9"]
)
def test_a_database_is_found_whatever_its_directory_is_called(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(state="running")
        db.commit()
    with closing(RunDb(directory, readonly=True)) as db:
        assert db.run()["state"] == "running"
    assert FILE in [path.name for path in directory.iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == [name]
