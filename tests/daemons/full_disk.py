"""A database that finds no room any more, as on a full disk."""

from __future__ import annotations

from dlctl.roles.coordinator import records as j
from dlctl.runs.database import RunDb

LARGE = j.AddEvent("error", "", "x" * 10_000, {})
"""Finds no room in a database that is full."""


def fill(db: RunDb) -> None:
    pages = db._db.execute("PRAGMA page_count").fetchone()[0]
    db._db.execute(f"PRAGMA max_page_count = {pages}")


def free_space(db: RunDb) -> None:
    db._db.execute("PRAGMA max_page_count = 100000")
