"""The run's SQLite file: what the coordinator writes and every reading command reads.

`status`, `events`, `wait` open it read-only and need no running daemon. WAL mode: readers never
block the writer. Rows that are objects are JSON, with units in their key names; times are seconds
since 1970 (UTC). Local disks only: SQLite's locks do not hold on NFS.

    run         key -> value: state, reason, step, loss, control address, pid of the coordinator ...
    daemon      name -> object: role, pid, state, phase, waiting_for, incarnation, metrics ...
    event       what happened, in order
    metric      time series, of the run and of each daemon, of bounded length: see `series`
    checkpoint  every checkpoint that was begun, and how it ended
    memory      the state that the next coordinator resumes from: that of
                `roles/coordinator/persistence.py`
    term        of an old run: its terms, which are in a file now: see `terms`

The row of a daemon that the job no longer has stays, as "removed": if the daemon returns, its
incarnations continue from there.

SQLite does not detect a flipped bit within a value. So every row has a checksum, except events and
metrics, on which nothing depends. A flipped bit in its write-ahead log is like a crash at that
time: SQLite drops the transactions that follow, and the next coordinator continues from an earlier
state. Only terms must never be lost: they have their own file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound
from dlctl.records import evaluated
from dlctl.util import regular
from dlctl.util.regular import NotRegular

SCHEMA_VERSION = 4
FILE = "run.db"
WAL_PAGES = 1000
"""Pages of 4 KiB in SQLite's log before it checkpoints them into the database. A checkpoint costs
three syncs, on a busy disk seconds; a longer log would take many megabytes for a few rows that
change frequently."""
ENDED = ("stopped", "finished", "failed")
"""States of a run that has ended, gracefully or not."""
REMOVED = "removed"
"""State of a daemon that an earlier execution had and the job no longer has."""
_SUMMED = ("run", "daemon", "checkpoint", "memory")
_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE daemon (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE event (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL,
                    daemon TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE metric (at REAL NOT NULL, daemon TEXT NOT NULL, step INTEGER NOT NULL,
                     value TEXT NOT NULL);
CREATE INDEX metric_by_daemon ON metric (daemon, at);
CREATE TABLE checkpoint (id INTEGER PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE memory (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
"""


def is_removed(directory: Path, lock: int) -> bool:
    """Whether a run directory was removed: the open lock file has no link any more. (A moved
    directory keeps its links; some file systems count none, hence the second check.)

    Raises OSError if that cannot be checked.
    """
    return not os.fstat(lock).st_nlink and not (directory / FILE).exists()


class RunDb:
    """One open run.db. Writers commit explicitly; a crash loses uncommitted changes."""

    def __init__(self, directory: Path, *, create: bool = False, readonly: bool = False) -> None:
        path = directory / FILE
        if not create and not path.exists():
            raise NotFound(f"{directory} is not a run directory: it has no {FILE}", hint="dlctl ps")
        try:
            _check_files(directory)
            if create and not path.exists():
                _make(path)
            address = path.absolute().as_uri()  # There may be "?" or "#" in the path.
            mode = "ro" if readonly else "rwc"
            self._db = sqlite3.connect(f"{address}?mode={mode}", uri=True, timeout=10)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            # Survives a crash of any process; see `sync` for power failures.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA cache_spill=OFF")  # Otherwise frames are written twice.
            self._db.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
        except sqlite3.Error as error:
            raise DlctlError(f"cannot use the run's database: {error}", where=str(path)) from error
        if version == 0:  # SQLite accepts an empty file as a database of version 0.
            raise DlctlError("cannot read the run's database: it is empty", where=str(path))
        if version != SCHEMA_VERSION:
            raise DlctlError(
                f"the run's database has version {version}, this dlctl needs {SCHEMA_VERSION}",
                where=str(path),
                hint="use the dlctl that created this run",
            )

    def close(self) -> None:
        self._db.close()

    def commit(self) -> None:
        self._db.commit()

    def sync(self) -> None:
        """Make all commits survive a power failure. Raises sqlite3.OperationalError.

        It does so by another commit, which changes nothing: a checkpoint of SQLite's log would skip
        frames newer than a reader's snapshot, and not sync them.
        """
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")

    def rollback(self) -> None:
        """Discard changes since the last commit."""
        self._db.rollback()

    # ------------------------------------------------------------ run and daemons

    def put_run(self, **values: Any) -> None:
        self._put("run", values)

    def put_end(self, state: str, reason: str, at: float) -> None:
        """Record the end of a run without a coordinator, in its state and events, for this reason.

        A live coordinator records it itself, as "stopping" and then as `state`.
        """
        self.put_run(state=state, reason=reason, waiting="", ended_at=at)
        self.add_event(at, "state", "", f"{state}: {reason}", {})

    def run(self) -> dict[str, Any]:
        return evaluated.in_new_form(dict(self._rows("run")))

    def put_daemon(self, name: str, value: dict[str, Any]) -> None:
        self._put("daemon", {name: value})

    def daemons(self) -> list[dict[str, Any]]:
        """The rows of the daemons that the job has, ordered by name."""
        return [row for row in self._daemon_rows() if row.get("state") != REMOVED]

    def remove_daemons(self, names: Iterable[str]) -> None:
        """Hide these; their incarnation counts stay (see `incarnations`)."""
        names = set(names)
        for row in self._daemon_rows():
            if row["name"] in names:
                self.put_daemon(row["name"], {**row, "state": REMOVED})

    def incarnations(self) -> dict[str, int]:
        """name -> number of its latest incarnation; also of removed daemons."""
        return {row["name"]: row["incarnation"] for row in self._daemon_rows()}

    def _daemon_rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self._rows("daemon")]

    # ------------------------------------------------------------ events and metrics

    def add_event(self, at: float, kind: str, daemon: str, text: str, data: dict[str, Any]) -> None:
        row = (at, kind, daemon, text, json.dumps(data))
        self._db.execute("INSERT INTO event (at, kind, daemon, text, data) VALUES (?,?,?,?,?)", row)

    def events(self, after: int = 0, kind: str = "") -> Iterator[dict[str, Any]]:
        """Events after the one with the id `after`; only of `kind`, if given."""
        columns = ("id", "at", "kind", "daemon", "text", "data")
        query = "SELECT * FROM event WHERE id > ? AND ? IN ('', kind) ORDER BY id"
        for row in self._db.execute(query, (after, kind)):
            event = dict(zip(columns, row, strict=True))
            yield {**event, "data": json.loads(event["data"])}

    def add_metric(self, at: float, daemon: str, step: int, value: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT INTO metric VALUES (?,?,?,?)", (at, daemon, step, json.dumps(value))
        )

    def metrics(self, daemon: str) -> Iterator[dict[str, Any]]:
        """One series, in the order of writing. Raises ValueError for a damaged row."""
        query = "SELECT at, step, value FROM metric WHERE daemon = ? ORDER BY rowid"
        for at, step, value in self._db.execute(query, (daemon,)):
            yield dict(json.loads(value), at=at, step=step)

    def metric_counts(self) -> dict[str, int]:
        """Name of a series -> its number of rows."""
        return dict(self._db.execute("SELECT daemon, COUNT(*) FROM metric GROUP BY daemon"))

    def thin_metrics(self, daemon: str) -> None:
        """Remove every second row of a series, except its first and last."""
        self._db.execute(
            "DELETE FROM metric WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER "
            "(ORDER BY rowid DESC) AS place FROM metric WHERE daemon = ?) WHERE place % 2 = 0)",
            (daemon,),
        )

    # ------------------------------------------------------------ checkpoints

    def put_checkpoint(self, number: int, value: dict[str, Any]) -> None:
        self._put("checkpoint", {number: value})

    def checkpoints(self) -> list[dict[str, Any]]:
        return [row for _, row in self._rows("checkpoint")]

    # ------------------------------------------------------------ memory

    def put_memory(self, values: dict[str, Any]) -> None:
        """Store the values of these keys; None deletes a key."""
        gone = [(key,) for key, value in values.items() if value is None]
        self._db.executemany("DELETE FROM memory WHERE key = ?", gone)
        self._put("memory", {k: v for k, v in values.items() if v is not None})

    def memory(self) -> dict[str, Any]:
        return dict(self._rows("memory"))

    def clear_memory(self) -> None:
        """Makes the next coordinator start a new execution."""
        self._db.execute("DELETE FROM memory")

    def old_terms(self) -> dict[str, int]:
        """The terms of a run that an earlier version has created; {} for other runs."""
        return dict(self._rows("term")) if self._has_old_terms() else {}

    def _has_old_terms(self) -> bool:
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'term'"
        return self._db.execute(query).fetchone() is not None

    # ------------------------------------------------------------ rows with a checksum

    def _put(self, table: str, values: Mapping[Any, Any]) -> None:
        texts = {key: json.dumps(value) for key, value in values.items()}
        rows = [(key, text, _crc(key, text)) for key, text in texts.items()]
        query = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)"  # noqa: S608 - ours
        self._db.executemany(query, rows)

    def _rows(self, table: str) -> Iterator[tuple[Any, Any]]:
        """(key, value) in the order of their keys. Raises sqlite3.DatabaseError."""
        query = f"SELECT * FROM {table} ORDER BY 1"  # noqa: S608 - ours
        for key, value, crc in self._db.execute(query):
            if crc != _crc(key, value):
                raise sqlite3.DatabaseError(f'row "{key}" of table {table} has a wrong checksum')
            yield key, json.loads(str(value))  # A term is an integer.

    def check(self) -> None:
        """Read everything. Raises sqlite3.DatabaseError naming the damage."""
        found = [str(row[0]) for row in self._db.execute("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            # The first finding: the others follow from it.
            raise sqlite3.DatabaseError(found[0].splitlines()[-1])
        for table in (*_SUMMED, *(["term"] if self._has_old_terms() else [])):
            for _ in self._rows(table):
                pass


def _crc(key: Any, value: Any) -> int:
    return zlib.crc32(f"{key}={value}".encode())


def damage(directory: Path) -> str:
    """What is wrong with the bytes of a run's database; "" if nothing is.

    A truncated or damaged write-ahead log is no damage: it only lacks the last transactions.
    """
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            db.check()
    except (sqlite3.Error, ValueError) as error:
        return str(error)
    except DlctlError as error:
        return str(error.__cause__) if error.__cause__ else ""  # Another version is not damage.
    return ""


def _check_files(directory: Path) -> None:
    """SQLite opens these by their names. Raises DlctlError if one is not a regular file."""
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-journal"):
        try:
            regular.check(directory / name)
        except NotRegular as error:
            text = f"cannot use the run's database: {name} is {error.kind}, not a regular file"
            raise DlctlError(text, where=str(directory / name)) from error


def _make(path: Path) -> None:
    """Create an empty database, atomically: other processes may read it at any moment."""
    unfinished = path.with_name(f".{FILE}.tmp")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.commit()
    unfinished.replace(path)


def read(directory: Path) -> dict[str, Any]:
    """A run and its daemons, as the coordinator last wrote them."""
    with closing(RunDb(directory, readonly=True)) as db:
        return {**db.run(), "daemons": db.daemons(), "directory": str(directory)}
