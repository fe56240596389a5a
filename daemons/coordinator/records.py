"""Performs the coordinator's effects that persist state: rows in run.db, and terms in their file.

The machine's times are monotonic; here they become wall-clock times. State that the next
coordinator needs is committed before any later message is sent. A term is on the disk before it is
remembered, and before it is sent to its daemon. The row of a checkpoint is committed at once if the
database is writable. All other rows are committed after the pending events are handled: a crash may
lose the last ones, although messages of the same moment were sent. An orderly end loses none, see
`finish`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from daemons.loop import Loop
from dlctl.launch import base
from dlctl.records.series import Series
from dlctl.roles.coordinator import records as j
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.protocol.effects import OnRecord, Unwritten
from dlctl.runs import terms
from dlctl.runs.database import RunDb
from dlctl.runs.terms import OnDisk, TermLog
from dlctl.util import processes
from dlctl.util.names import HOME_AGENT, MEASURED
from dlctl.wire.machine import Send
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
RETRY_S = 1.0
FINISH_S = 5.0
"""Time to write the last rows: less than `dlctl stop` waits for the coordinator to exit."""
FINISH_RETRY_S = 0.1
ROWS_KEPT = 1000
"""Rows of history that are kept in memory while the database cannot be written."""


Outcome = Literal["finished", "failed", "stopped"]
"""The final states of a run."""


class Exporter:
    """Exports the records to another system. It never blocks; `export` calls it, as it may fail."""

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        """A row of a series (`records/series.py`); at: seconds since 1970."""

    def take_snapshot(self, run: Json, daemons: Sequence[Json]) -> None:
        """Store the state that `status` shows now."""

    def tend(self) -> None:
        """About once a second: whatever else is due."""

    def close(self, outcome: Outcome | None) -> None:
        """Write what is left and close. outcome: how the run has ended; None: it goes on with
        another coordinator.
        """


def export(exporters: list[Exporter], what: Callable[[Exporter], None]) -> None:
    """Remove an exporter that fails, so that it never ends the run."""
    for exporter in [*exporters]:
        try:
            what(exporter)
        except Exception:  # Libraries raise anything.
            log.exception("%s has failed; training continues", type(exporter).__name__)
            exporters.remove(exporter)


class RunRecords:
    def __init__(self, directory: Path, db: RunDb, loop: Loop) -> None:
        self.directory = directory
        self.db = db
        self.loop = loop
        self._history: list[Callable[[], None]] = []
        self._metrics: list[Callable[[], None]] = []
        self._overview: list[Callable[[], None]] = []
        """The writes of the newest snapshot, which supersedes all earlier ones."""
        self._memory: dict[str, Any] = {}
        """Persisted values of the coordinator's parts that are not written yet."""
        self._terms_file = OnDisk(directory)
        self._terms = TermLog(self._terms_file, terms.newest(directory, db))
        self._lasting = Lasting()
        self.trouble = ""
        """Why the database cannot be written; "" while it can."""
        self._retry_at = 0.0
        self._series = Series(db.metric_counts(), db.run().get("metric_every_s") or {})
        self.exporters: list[Exporter] = []
        self._names: set[str] = set()
        self.me: Json = {"pid": os.getpid(), "pid_start": processes.start_of(os.getpid())}
        """The columns of the run that identify this coordinator, and the arguments of `begin`.
        Every snapshot writes them again: another coordinator, started by mistake, may have
        overwritten them, and while the disk is full only the newest rows are retained.
        """
        loop.perform(Send, self._on_send)
        loop.perform(j.Remember, self._on_remember)
        loop.perform(j.IssueTerm, self._on_term)
        loop.perform(j.PutOnRecord, lambda _: self._lasting.await_all())
        loop.perform(j.AddEvent, self._on_event)
        loop.perform(j.AddMetric, self._on_metric)
        loop.perform(j.StatusSnapshot, self._on_snapshot)
        loop.perform(j.RecordCheckpoint, self._on_checkpoint)
        loop.after_events = self.commit
        loop.chores.append(lambda: export(self.exporters, lambda exporter: exporter.tend()))

    # ------------------------------------------------------------ rows

    def begin(self, corrections: Json, **run: Any) -> bool:
        """Record this process as the run's coordinator, and what `dlctl recover` has corrected in
        the memory. Returns whether that is written: on a full disk it waits for space, like all
        other rows.
        """
        self.me |= run
        self._memory |= corrections
        self._history.append(lambda: self.db.put_run(**self.me, recovery=None))
        self.commit()
        return not self._has_news()

    def commit(self) -> None:
        """Write the pending rows. A failing disk does not stop training: the write is retried.

        Terms come first: if the next coordinator found that a daemon had registered, and not its
        term, it would issue the term again. The sync of the rows follows them, so that a disk that
        only fails to sync still stores them.
        """
        if (self._lasting.is_on_disk and not self._has_news()) or time.monotonic() < self._retry_at:
            return
        try:
            self._terms.append()
            self._write_rows()
            if not self._lasting.is_on_disk:
                self.db.sync()
        except (OSError, sqlite3.OperationalError) as error:
            self._put_off(error)
            return
        if self._lasting.written():
            self.loop.post(OnRecord())
        if self.trouble:
            log.warning("the run's database can be written again")
            self._report("")

    def _write_rows(self) -> None:
        """Write all pending rows in one transaction. Raises sqlite3.OperationalError."""
        self.db.put_memory(self._memory)
        for write in (*self._history, *self._metrics, *self._overview):
            write()
        self.db.commit()
        for written in (self._history, self._metrics, self._overview, self._memory):
            written.clear()

    def _has_news(self) -> bool:
        rows = self._history or self._metrics or self._overview
        return bool(rows or self._memory or not self._terms.is_synced)

    def _put_off(self, error: OSError | sqlite3.OperationalError) -> None:
        trouble = str(error.strerror if isinstance(error, OSError) else error)
        self.db.rollback()
        del self._history[:-ROWS_KEPT]
        self._metrics.clear()
        self._retry_at = time.monotonic() + RETRY_S
        if not self.trouble:
            log.error("cannot write the run's database: %s; training continues", trouble)
        self._report(trouble)

    def _report(self, trouble: str) -> None:
        """Notify the machine: it can issue terms only while the database is writable."""
        if trouble != self.trouble:
            self.trouble = trouble
            self.loop.post(Unwritten(trouble))

    def finish(self, outcome: Outcome | None) -> None:
        """Write the last rows at the end of the run: without them, a reader takes the run for one
        whose coordinator died. outcome: None if another coordinator continues.
        """
        until = time.monotonic() + FINISH_S
        while True:
            self._retry_at = 0.0
            self.commit()
            if not self._has_news():
                break
            if time.monotonic() >= until:
                log.error("the end of the run is not on record: %s", self.trouble)
                break
            time.sleep(FINISH_RETRY_S)
        export(self.exporters, lambda exporter: exporter.close(outcome))
        self._terms_file.close()

    def _on_remember(self, effect: j.Remember) -> None:
        self._memory[effect.key] = effect.value
        self._lasting.remembers(effect.key, effect.value)

    def _on_term(self, effect: j.IssueTerm) -> None:
        self._terms.issue(effect.name, effect.term)
        self._lasting.issues_term()

    def _on_send(self, effect: Send) -> None:
        """Commit pending state before sending. (While the disk is full, messages are sent
        nevertheless: training continues, and a coordinator that died just then would lease portions
        twice.) State that must never be lost is not sent before it is on the disk.
        """
        if self._memory or not self._lasting.is_on_disk:
            self.commit()
        if not self._lasting.may_leave(effect.message):
            return  # The receiver will request it again.
        self.loop.transport.send(effect.peer, effect.message)

    def _on_event(self, effect: j.AddEvent) -> None:
        row = (time.time(), effect.kind, effect.daemon, effect.text, effect.data)
        self._history.append(lambda: self.db.add_event(*row))

    def _on_metric(self, effect: j.AddMetric) -> None:
        if not self._series.take(effect.daemon, time.monotonic(), always=effect.is_last):
            return
        row = (time.time(), effect.daemon, effect.step, dict(effect.values))
        self._metrics.append(lambda: self.db.add_metric(*row))
        if self._series.thin(effect.daemon):
            self._metrics.append(partial(self.db.thin_metrics, effect.daemon))
        export(self.exporters, lambda exporter: exporter.add_row(*row))

    def _on_snapshot(self, effect: j.StatusSnapshot) -> None:
        # `updated_by` shows a reader whether the current coordinator wrote this row.
        run = to_wall_clock(effect.run) | self.me | {"updated_by": self.me["pid_start"]}
        export(self.exporters, lambda exporter: exporter.take_snapshot(run, effect.daemons))
        run["metric_every_s"] = dict(self._series.every_s)
        names = {row["name"] for row in effect.daemons}
        if names != self._names:
            # The pending rows of removed daemons are their last ones.
            self._history += [*self._overview, lambda: self._remove_daemons_but(names)]
            self._names = names
        self._overview = [lambda: self.db.put_run(**run)]
        for row in effect.daemons:
            shown = to_wall_clock(row) | {"pid_start": start_of(self.directory, row)}
            self._overview.append(partial(self.db.put_daemon, row["name"], shown))

    def _remove_daemons_but(self, names: set[str]) -> None:
        """Remove daemons that are not in the snapshot, unless their processes are still alive."""
        others = [row for row in self.db.daemons() if row["name"] not in names]
        alive = [row["name"] for row in processes.living(others)]
        self.db.remove_daemons({row["name"] for row in others}.difference(alive))

    def _on_checkpoint(self, effect: j.RecordCheckpoint) -> None:
        row = to_wall_clock(effect.value)
        self._history.append(lambda: self.db.put_checkpoint(effect.number, row))
        self.commit()


def start_of(directory: Path, row: Json) -> str | None:
    """`processes.start_of` the process in this row: pids are reused, (pid, start) is unique. None
    for another machine.
    """
    if row["pid"] is None or row["agent"] != HOME_AGENT:
        return None
    with suppress(LookupError):
        return _start_of(directory, row["role"], row["name"], row["incarnation"], row["pid"])
    return None


@lru_cache(4096)
def _start_of(directory: Path, role: str, name: str, incarnation: int, pid: int) -> str:
    """Looked up until it is known. A pid from an earlier coordinator may have been reused: it
    counts only if the command line is that of this daemon. Raises LookupError, which is not cached.
    """
    start = processes.start_of(pid)
    command = base.parse_argv(processes.command_line(pid, start), directory)
    if start is None or command != (role, name, incarnation):
        raise LookupError(pid)
    return start


def to_wall_clock(value: Any, offset_s: float | None = None) -> Any:
    """A copy of a JSON value; its times (keys that end in at or since) are seconds since 1970."""
    if offset_s is None:
        offset_s = time.time() - time.monotonic()
    if isinstance(value, list):
        return [to_wall_clock(item, offset_s) for item in value]
    if not isinstance(value, dict):
        return value
    shifted: Json = {}
    for key, item in value.items():
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if key in MEASURED:
            shifted[key] = item
        else:
            is_time = is_number and key.rpartition("_")[2] in ("at", "since")
            shifted[key] = item + offset_s if is_time else to_wall_clock(item, offset_s)
    return shifted
