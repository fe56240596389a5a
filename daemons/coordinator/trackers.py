"""Sends the run's series to trackers, wandb and MLflow: one run of theirs for all workers.

A tracker's package is imported in a process of its own (`daemons/tracker/`), and never here
(`delivery_process.py`).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from daemons.coordinator.delivery_process import CLOSE_S, DeliveryProcess, is_readable
from daemons.coordinator.records import Exporter, Outcome
from daemons.tracker.notes import FOLDER, noted
from dlctl.observe.delivery import Delivery
from dlctl.observe.tags import TaggedRows
from dlctl.records.series import EVALUATION, RUN
from dlctl.roles.protocol.effects import TrackerTrouble
from dlctl.runs.database import RunDb
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
LOOK_S = 0.1

Post = Callable[[TrackerTrouble], None]


class Trackers(Exporter):
    def __init__(self, directory: Path, names: Sequence[str], post: Post, db: RunDb) -> None:
        """db: of the run; its rows that a tracker has not got from an earlier coordinator are sent
        first.
        """
        self._rows = TaggedRows()
        self._trackers = [_process(directory, name, post) for name in names]
        self._last = [_last(directory, name) for name in names]
        """Series -> time and step of the last row that each tracker had when this began."""
        self._recall(db)

    def _recall(self, db: RunDb) -> None:
        for series in (RUN, EVALUATION):
            try:
                for row in db.metrics(series):
                    self._send(row["at"], series, row["step"], row, is_recalled=True)
            except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
                log.warning("trackers do not get all earlier rows: run.db is damaged: %s", error)

    def tend(self) -> None:
        """Start what is to be started, send what waits, and take the answers."""
        now = time.monotonic()
        for tracker in self._trackers:
            tracker.tend(now)

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        self._send(at, name, step, values)

    def _send(
        self, at: float, name: str, step: int, values: Json, *, is_recalled: bool = False
    ) -> None:
        if not (found := self._rows.values(at, name, step, values)):
            return
        row = {"series": name, "at": at, "step": step, "values": found}
        for tracker, last in zip(self._trackers, self._last, strict=True):
            if not is_recalled:
                tracker.add(row)
            elif name not in last or at > last[name][0]:
                tracker.add({**row, "is_recalled": True})

    def close(self, outcome: Outcome | None) -> None:
        if outcome is None:
            for tracker in self._trackers:
                tracker.let_go()
            return
        until = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.hurry()
            tracker.add({"outcome": outcome})
        left = self._trackers
        while left and (now := time.monotonic()) < until:
            for tracker in left:
                tracker.tend(now)
            left = [tracker for tracker in left if tracker.pending and not tracker.has_failed(now)]
            is_readable([fd for tracker in left for fd in tracker.fds], LOOK_S)
        for tracker in self._trackers:
            tracker.close(until)


def _process(directory: Path, name: str, post: Post) -> DeliveryProcess:
    def tell(why: str, dropped: int) -> None:
        post(TrackerTrouble(name, why, dropped))

    module = ["daemons.tracker", str(directory), name, str(os.getpid())]
    return DeliveryProcess(name, module, Delivery(), tell)


def _last(directory: Path, name: str) -> Json:
    with suppress(OSError, ValueError):  # Its process says what is wrong with them.
        found: Json = noted(directory / FOLDER / f"{name}.json")["last"]
        return found
    return {}
