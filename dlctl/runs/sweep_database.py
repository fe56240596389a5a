"""`sweep.db` in the directory of a sweep: its plan, and every trial. SQLite, local disks only.

A trial is `queued` when it is asked for, `running` with a run directory, then `done`, `failed` or
`pruned`. One that was running when the sweep was killed is `preempted` when that is noticed: it is
taken up from its run's checkpoint, and counts once. `rung` counts the looks of the pruner that it
has passed. What has failed is tried again when a user resumes the sweep.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError, NotFound

FILE = "sweep.db"
VERSION = 1
ENDED = ("done", "failed", "pruned")
JOB = "job"
"""The row of the plan with the job."""
Json = dict[str, Any]
_COLUMNS = ("number", "generation", "seed", "state", "rung", "point", "run", "score", "reason")
_SCHEMA = """
CREATE TABLE plan (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trial (number INTEGER PRIMARY KEY, generation INTEGER NOT NULL, seed INTEGER NOT NULL,
                    state TEXT NOT NULL, rung INTEGER NOT NULL DEFAULT 0, point TEXT NOT NULL,
                    run TEXT NOT NULL, score REAL, reason TEXT NOT NULL);
"""


class SweepDb:
    """One open sweep.db. Every change is on the disk when its method returns. Thread-safe."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        path = directory / FILE
        if not create and not path.is_file():
            raise NotFound(f"{directory} is no directory of a sweep", hint="dlctl sweep ls")
        self._turn = threading.Lock()
        self._db = sqlite3.connect(path, timeout=10, check_same_thread=False)
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if create and not version:
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={VERSION}")
            self._db.commit()
        elif version != VERSION:
            what = f"the sweep has version {version}, this dlctl reads {VERSION}"
            raise DlctlError(what, where=str(path), hint="use the dlctl that began it")

    def close(self) -> None:
        self._db.close()

    def put_plan(self, plan: Mapping[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in plan.items()]
        with self._turn, self._db:
            self._db.executemany("INSERT OR REPLACE INTO plan VALUES (?, ?)", rows)

    def plan(self) -> Json:
        return {key: value for key, value in self._rows().items() if key != JOB}

    def job(self) -> Json | None:
        """The resolved job that the sweep has begun with; None: a sweep of an earlier dlctl."""
        found: Json | None = self._rows().get(JOB)
        return found

    def put_job(self, content: Mapping[str, Any]) -> None:
        self.put_plan({JOB: content})

    def _rows(self) -> Json:
        with self._turn:
            found = self._db.execute("SELECT key, value FROM plan").fetchall()
        return {key: json.loads(value) for key, value in found}

    def add(self, generation: int, trials: list[tuple[Json, int]]) -> None:
        """A generation of (point, seed): all of it, or nothing."""
        with self._turn, self._db:
            for point, seed in trials:
                row = (generation, seed, "queued", json.dumps(point), "", None, "")
                self._db.execute(
                    "INSERT INTO trial (generation, seed, state, point, run, score, reason) "
                    "VALUES (?,?,?,?,?,?,?)",
                    row,
                )

    def set(self, number: int, **values: Any) -> None:
        """Change columns of a trial."""
        assert values.keys() <= set(_COLUMNS), values
        columns = ", ".join(f"{key} = ?" for key in values)
        query = f"UPDATE trial SET {columns} WHERE number = ?"  # noqa: S608  (our own names)
        with self._turn, self._db:
            self._db.execute(query, (*values.values(), number))

    def prune(self, worst: Sequence[int], others: Sequence[int], rung: int) -> None:
        """End the worst trials of a rung; the others have passed it. All of that, or nothing: a
        rung is judged once, also if the sweep is killed meanwhile.
        """
        ended = [(f"rung {rung + 1}", number) for number in worst]
        passed = [(rung + 1, number) for number in others]
        with self._turn, self._db:
            query = "UPDATE trial SET state = 'pruned', reason = ? WHERE number = ?"
            self._db.executemany(query, ended)
            self._db.executemany("UPDATE trial SET rung = ? WHERE number = ?", passed)

    def trials(self) -> list[Json]:
        """All of them, by number."""
        with self._turn:
            query = f"SELECT {', '.join(_COLUMNS)} FROM trial ORDER BY number"  # noqa: S608
            rows = self._db.execute(query).fetchall()
        found = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        return [{**row, "point": json.loads(row["point"])} for row in found]


def read(directory: Path) -> tuple[Json, list[Json]]:
    """The plan and the trials of a sweep. Raises NotFound or DlctlError."""
    with closing(SweepDb(directory)) as db:
        return db.plan(), db.trials()
