"""The run's SQLite file: what the coordinator writes and every reading command reads.

`status`, `events`, `wait` open it read-only and need no running daemon. WAL mode: readers never
block the writer. Rows that are objects are JSON, with units in their key names; times are seconds
since 1970 (UTC). Local disks only: SQLite's locks do not hold on NFS.

    run         key -> value: state, reason, step, loss, control address, pid of the coordinator ...
    daemon      name -> object: role, pid, state, phase, waiting_for, incarnation, metrics ...
    event       what happened, in order
    metric      time series, of the run and of each daemon, of bounded length: see `series`
    checkpoint  every checkpoint that was begun, and how it ended
    term        epochs and generations, on the disk before they are handed out
    memory      what the next coordinator goes on with, should this one die (`roles/memory.py`)

The row of a daemon that the job no longer has stays, as "removed": its incarnations are counted on
if it comes back.

SQLite notices neither a bit that flips within a value nor, in its log, what it costs (see
`writeahead`). So every row has a checksum but those of what happened, on which nothing is built,
and nobody who writes opens a database whose log is damaged: to close it would hide the damage.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound
from dlctl.runs import wal
from dlctl.util import processes

SCHEMA_VERSION = 4
FILE = "run.db"
WAL_PAGES = 1000
"""Of 4 KiB, after which what was written goes from SQLite's log into the database. That costs three
syncs, on a busy disk seconds; and a run should not need many megabytes for a few rows that change
all the time."""
LOOKS_MAX = 5
"""At a log that seems to be damaged, while it becomes another one all the time."""
ENDED = ("stopped", "finished", "failed")
"""States of a run that has come to its end, in order or not."""
REMOVED = "removed"
"""State of a daemon that an earlier execution had and the job no longer has."""
_SUMMED = ("run", "daemon", "checkpoint", "term", "memory")
_PAGE = re.compile(r"\bpage (\d+)", re.IGNORECASE)
_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE daemon (name TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE event (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL,
                    daemon TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE metric (at REAL NOT NULL, daemon TEXT NOT NULL, step INTEGER NOT NULL,
                     value TEXT NOT NULL);
CREATE INDEX metric_by_daemon ON metric (daemon, at);
CREATE TABLE checkpoint (id INTEGER PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE term (name TEXT PRIMARY KEY, term INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE memory (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
"""


def is_removed(directory: Path, lock: int) -> bool:
    """Whether a run directory was removed, as who has its lock open can see: nothing of it has a
    name any more. (One that was moved is still somewhere; some file systems count no links.)

    Raises OSError if that cannot be seen.
    """
    return not os.fstat(lock).st_nlink and not (directory / FILE).exists()


class RunDb:
    """One open run.db. Writers commit explicitly: before that, a crash loses what was put."""

    def __init__(self, directory: Path, *, create: bool = False, readonly: bool = False) -> None:
        path = directory / FILE
        if not create and not path.exists():
            what = f"no run directory: it has no {FILE}" if directory.exists() else "not there"
            raise NotFound(f"{directory} is {what}", hint="dlctl ps")
        mode = "ro" if readonly else "rwc"
        try:
            if create and not path.exists():
                _make(path)
            if not readonly and (damage := damage_of_log(directory)):
                raise DlctlError(
                    f"cannot use the run's database: {damage}",
                    where=str(path),
                    hint=f"dlctl recover --dry-run -j {directory.name}",
                )
            address = f"{path.absolute().as_uri()}?mode={mode}"  # There may be "?" or "#" in it.
            self._db = sqlite3.connect(address, uri=True, timeout=10)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            # Survives the end of any process; what has to survive more than that, see `sync`.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA cache_spill=OFF")  # Or frames are written twice.
            self._db.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
        except sqlite3.Error as error:
            raise DlctlError(f"cannot use the run's database: {error}", where=str(path)) from error
        if version == 0:  # What SQLite takes an empty file for.
            raise DlctlError("cannot read the run's database: it is empty", where=str(path))
        if version != SCHEMA_VERSION:
            raise DlctlError(
                f"the run's database has version {version}, this dlctl needs {SCHEMA_VERSION}",
                where=str(path),
                hint="use the dlctl that made this run",
            )

    def close(self) -> None:
        self._db.close()

    def commit(self) -> None:
        self._db.commit()

    def sync(self) -> None:
        """What is committed survives a power failure from now on. Raises sqlite3.OperationalError.

        By one commit more, which changes nothing: a checkpoint of SQLite's log would pass over
        what is newer than somebody's view of the database, and sync nothing of it.
        """
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")

    def rollback(self) -> None:
        """Forget what was put since the last commit."""
        self._db.rollback()

    # ------------------------------------------------------------ run and daemons

    def put_run(self, **values: Any) -> None:
        self._put("run", {key: json.dumps(value) for key, value in values.items()})

    def put_end(self, state: str, reason: str, at: float) -> None:
        """The run is over, and no coordinator says so: here and among the events, for this reason.

        It says so itself, when there is one, as "stopping" and then as `state`.
        """
        self.put_run(state=state, reason=reason, waiting="", ended_at=at)
        self.add_event(at, "state", "", f"{state}: {reason}", {})

    def run(self) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in self._rows("run")}

    def put_daemon(self, name: str, value: dict[str, Any]) -> None:
        self._put("daemon", {name: json.dumps(value)})

    def daemons(self) -> list[dict[str, Any]]:
        """The rows of the daemons that the job has, ordered by name."""
        return [row for row in self._daemon_rows() if row.get("state") != REMOVED]

    def remove_daemons(self, names: Iterable[str]) -> None:
        """Show these no more; what was counted about them stays (see `incarnations`)."""
        names = set(names)
        for row in self._daemon_rows():
            if row["name"] in names:
                self.put_daemon(row["name"], {**row, "state": REMOVED})

    def incarnations(self) -> dict[str, int]:
        """name -> number of its latest incarnation; removed daemons, too."""
        return {row["name"]: row["incarnation"] for row in self._daemon_rows()}

    def _daemon_rows(self) -> list[dict[str, Any]]:
        return [json.loads(value) for _, value in self._rows("daemon")]

    # ------------------------------------------------------------ what happened

    def add_event(self, at: float, kind: str, daemon: str, text: str, data: dict[str, Any]) -> None:
        row = (at, kind, daemon, text, json.dumps(data))
        self._db.execute("INSERT INTO event (at, kind, daemon, text, data) VALUES (?,?,?,?,?)", row)

    def events(self, after: int = 0, kind: str = "") -> Iterator[dict[str, Any]]:
        """Those behind the one with the id `after`; only of one kind, if it is given."""
        query = (
            "SELECT id, at, kind, daemon, text, data FROM event"
            " WHERE id > ? AND ? IN ('', kind) ORDER BY id"
        )
        for id_, at, of_kind, daemon, text, data in self._db.execute(query, (after, kind)):
            yield {
                "id": id_,
                "at": at,
                "kind": of_kind,
                "daemon": daemon,
                "text": text,
                "data": json.loads(data),
            }

    def add_metric(self, at: float, daemon: str, step: int, value: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT INTO metric VALUES (?,?,?,?)", (at, daemon, step, json.dumps(value))
        )

    def metrics(self, daemon: str) -> Iterator[dict[str, Any]]:
        """One series, in the order in which it was written. Raises ValueError for a damaged row."""
        query = "SELECT at, step, value FROM metric WHERE daemon = ? ORDER BY rowid"
        for at, step, value in self._db.execute(query, (daemon,)):
            yield dict(json.loads(value), at=at, step=step)

    def metric_counts(self) -> dict[str, int]:
        """Name of a series -> its rows."""
        return dict(self._db.execute("SELECT daemon, COUNT(*) FROM metric GROUP BY daemon"))

    def thin_metrics(self, daemon: str) -> None:
        """Remove every second row of a series, but neither its first nor its last one."""
        self._db.execute(
            "DELETE FROM metric WHERE rowid IN (SELECT rowid FROM (SELECT rowid, row_number() OVER "
            "(ORDER BY rowid DESC) AS place FROM metric WHERE daemon = ?) WHERE place % 2 = 0)",
            (daemon,),
        )

    # ------------------------------------------------------------ checkpoints

    def put_checkpoint(self, number: int, value: dict[str, Any]) -> None:
        self._put("checkpoint", {number: json.dumps(value)})

    def checkpoints(self) -> list[dict[str, Any]]:
        return [json.loads(value) for _, value in self._rows("checkpoint")]

    # ------------------------------------------------------------ terms and memory

    def put_terms(self, terms: Mapping[str, int]) -> None:
        """Daemon -> its newest epoch or generation. None is ever given twice: before it is handed
        out this has to be committed, and to survive a power failure (see `sync`).
        """
        self._put("term", terms)

    def put_memory(self, values: dict[str, Any]) -> None:
        """None: forget the key."""
        gone = [(key,) for key, value in values.items() if value is None]
        self._db.executemany("DELETE FROM memory WHERE key = ?", gone)
        self._put("memory", {k: json.dumps(v) for k, v in values.items() if v is not None})

    def memory(self) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in self._rows("memory")}

    def clear_memory(self) -> None:
        """The next coordinator begins a new execution."""
        self._db.execute("DELETE FROM memory")

    def terms(self) -> dict[str, int]:
        return dict(self._rows("term"))

    # ------------------------------------------------------------ rows with a checksum

    def _put(self, table: str, values: Mapping[Any, Any]) -> None:
        rows = [(key, value, _crc(key, value)) for key, value in values.items()]
        query = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)"  # noqa: S608 - ours
        self._db.executemany(query, rows)

    def _rows(self, table: str) -> Iterator[tuple[Any, Any]]:
        """(key, value) in the order of their keys. Raises sqlite3.DatabaseError."""
        query = f"SELECT * FROM {table} ORDER BY 1"  # noqa: S608 - ours
        for key, value, crc in self._db.execute(query):
            if crc != _crc(key, value):
                raise sqlite3.DatabaseError(f'row "{key}" of table {table} is not what was written')
            yield key, value

    def check(self) -> None:
        """Read everything. Raises sqlite3.DatabaseError naming what is damaged."""
        found = [str(row[0]) for row in self._db.execute("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            raise sqlite3.DatabaseError(_in_plain_words(found))
        for table in _SUMMED:
            for _ in self._rows(table):
                pass


def _in_plain_words(found: Sequence[str]) -> str:
    """What SQLite's check has found first: the rest follows from it, and are its own affairs."""
    if page := _PAGE.search(found[0]):
        return f"page {page[1]} is damaged"
    return found[0].splitlines()[-1]


def _crc(key: Any, value: Any) -> int:
    return zlib.crc32(f"{key}={value}".encode())


def damage(directory: Path) -> str:
    """What is wrong with the bytes of a run's database; "" if nothing is.

    A write-ahead log that was cut off is no damage: its last transactions are missing then.
    """
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            db.check()
    except sqlite3.Error as error:
        return str(error)
    except DlctlError as error:
        return str(error.__cause__) if error.__cause__ else ""  # It is of another version.
    return damage_of_log(directory)


def damage_of_log(directory: Path) -> str:
    """What is wrong with the log of a run's database; "" if nothing is. All of it is read: about 15
    ms for each MB.

    Whoever looks while somebody writes may see two states at once; damage stays as it is.
    """
    file, before = directory / f"{FILE}-wal", b""
    for _ in range(LOOKS_MAX):
        try:
            log = file.read_bytes()
        except OSError:
            break
        at = wal.damaged_at(log, same_boot=True)
        if at is not None and _is_of_another_boot(directory):
            at = wal.damaged_at(log, same_boot=False)
        if at is None:
            break
        if log == before:
            return f"{file.name} is damaged at byte {at:,} of {len(log):,}"
        before = log
    return ""


def _is_of_another_boot(directory: Path) -> bool:
    """Whether the machine is known to have been started again since the last coordinator wrote."""
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            start = db.run().get("pid_start")
    except (sqlite3.Error, DlctlError):
        return False
    return start is not None and processes.age_s(start) is None


def _make(path: Path) -> None:
    """An empty database, under its name only when it is whole: others may look at any moment."""
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
