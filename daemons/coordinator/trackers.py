"""Sends the run's series to trackers, wandb and MLflow: one run of theirs for all workers.

A tracker's package is imported in a process of its own (`daemons/tracker/`), and never here: it
may block, start threads, or end its process. Pipes to it never block; what it does not take waits
in a bounded queue (`dlctl/observe/delivery.py`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemons.coordinator.records import Exporter, Outcome
from daemons.tracker.notes import FOLDER, noted
from dlctl.observe.delivery import Delivery
from dlctl.observe.tags import TaggedRows
from dlctl.records.series import EVALUATION, RUN
from dlctl.roles.protocol.effects import TrackerTrouble
from dlctl.runs.database import RunDb
from dlctl.util.redact import redacted
from dlctl.util.text import plural
from dlctl.util.values import exit_in_words
from dlctl.wire.messages import Json

log = logging.getLogger("dlctl")
CLOSE_S = 14.0
"""Time for the last rows at the end of the run: less than `dlctl stop` waits for the coordinator.
"""
EXIT_S = 1.0
"""Of it, at least, for a process to exit once it has answered everything."""
LOOK_S = 0.1
PIECE_BYTES = 1 << 16
SAID_BYTES, PRINTED_BYTES_MAX = 2000, 1 << 20
"""Of what a process has printed the end is read if it dies; so much is kept."""

Post = Callable[[TrackerTrouble], None]


class Trackers(Exporter):
    def __init__(self, directory: Path, names: Sequence[str], post: Post, db: RunDb) -> None:
        """db: of the run; its rows that a tracker has not got from an earlier coordinator are sent
        first.
        """
        self._rows = TaggedRows()
        self._trackers = [TrackerLink(directory, name, post) for name in names]
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
        for tracker in self._trackers:
            if not is_recalled:
                tracker.add(row)
            elif not tracker.has(name, at):
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
            _is_readable([fd for tracker in left for fd in tracker.fds], LOOK_S)
        for tracker in self._trackers:
            tracker.close(until)


class TrackerLink:
    """The process of one tracker, as long as it lives, and then the next one."""

    def __init__(self, directory: Path, name: str, post: Post) -> None:
        self._directory = directory
        self._name = name
        self._post = post
        self._delivery = Delivery()
        self._told = ("", 0)
        """Why rows do not arrive, and how many never will, as posted last."""
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Json = {}
        """Series -> time and step of the last row that the tracker had when this began."""
        with suppress(OSError, ValueError):  # Its process says what is wrong with them.
            self._last = noted(directory / FOLDER / f"{name}.json")["last"]
        self._printed = os.memfd_create(name)
        """What processes print besides: a pipe would break for one that outlives this."""
        fcntl.fcntl(self._printed, fcntl.F_SETFL, os.O_APPEND)
        self._unwritten = self._unread = b""
        """The rest of a row, and of an answer."""
        self._is_over = False
        self._error = ""
        """What the process has given as the reason for its end."""

    @property
    def pending(self) -> int:
        return self._delivery.pending

    @property
    def fds(self) -> list[int]:
        """Readable when the process has answered."""
        process = self._process
        return [process.stdout.fileno()] if process is not None and process.stdout else []

    def has(self, series: str, at: float) -> bool:
        """Whether the tracker has had the row of this time from an earlier coordinator."""
        last = self._last.get(series)
        return last is not None and at <= last[0]

    def add(self, row: Json) -> None:
        """A killed coordinator loses no row that it has stored: it is in the pipe before."""
        self._delivery.add(json.dumps(row).encode())
        self._is_over |= "outcome" in row
        if self._process is not None:
            self._write(time.monotonic())

    def hurry(self) -> None:
        self._delivery.hurry()

    def has_failed(self, now: float) -> bool:
        """Whether there is no process, nor a reason to start one now."""
        return self._process is None and not self._delivery.may_start(now)

    def tend(self, now: float) -> None:
        if self._delivery.may_start(now):
            self._start(now)
        if self._process is not None:
            self._read(now)
            self._write(now)
            self._look(now)
        self._tell()

    def let_go(self) -> None:
        """The process delivers what it has, and leaves. The next coordinator sends the rest."""
        if self._process is not None:
            self._close_pipes(self._process)

    def close(self, until: float) -> None:
        """End the process: in order if it has answered everything, and does so in time."""
        left, process = plural(self.pending, "row") if self.pending else "", self._process
        is_new = not self._delivery.has_begun and not self._delivery.why
        if process is not None and left and is_new:
            # To kill it may break a database that it makes. It ends by itself (`daemons/tracker/`).
            log.warning("%s is still starting: its process goes on with %s", self._name, left)
            self._close_pipes(process)
            return
        if left:
            why = self._delivery.why or f"not in {CLOSE_S:g} s"
            log.error("%s did not get the last %s: %s", self._name, left, why)
        if process is not None:
            if not left:
                self._has_ended(process, max(until - time.monotonic(), EXIT_S))
            self._kill(process)

    # ------------------------------------------------------------ the process

    def _start(self, now: float) -> None:
        command = [sys.executable, "-P", "-m", "daemons.tracker"]
        try:
            self._process = subprocess.Popen(
                [*command, str(self._directory), self._name, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._delivery.ended(f"cannot start its process: {error.strerror}", now)
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        os.ftruncate(self._printed, 0)
        self._unwritten = self._unread = b""
        self._error = ""
        self._delivery.started(now)

    def _look(self, now: float) -> None:
        """Whether the process has ended, or hangs."""
        process = self._process
        assert process is not None
        if self._has_ended(process, 0.0):
            self._read(now)
            if self._is_over and not self.pending:
                return  # It has answered the outcome, its last row.
            how, last = exit_in_words(self._kill(process)), self._last_words()
            why = self._error or "; ".join(filter(None, (f"its process ended: {how}", last)))
        elif self._delivery.is_late(now):
            self._kill(process)
            why = "its process has not answered in time and was killed"
        else:
            return
        self._delivery.ended(why, now)

    def _has_ended(self, process: subprocess.Popen[bytes], within_s: float) -> bool:
        """Whether the process exits in time. It stays a zombie, so that its group is no other."""
        pidfd = os.pidfd_open(process.pid)
        try:
            return _is_readable([pidfd], within_s)
        finally:
            os.close(pidfd)

    def _kill(self, process: subprocess.Popen[bytes]) -> int:
        """Kill all that is left of its group: a package may have started processes of its own.
        Returns how the process has ended.
        """
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._process = None
        self._close_pipes(process)
        if not self._has_ended(process, EXIT_S):  # It hangs in the kernel, as in a dead mount.
            log.error("process %d of %s was killed and does not end", process.pid, self._name)
            return -signal.SIGKILL
        return process.wait()

    def _close_pipes(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _last_words(self) -> str:
        end = max(os.fstat(self._printed).st_size - SAID_BYTES, 0)
        said = redacted(os.pread(self._printed, SAID_BYTES, end).decode(errors="replace"))
        return next((line.strip() for line in reversed(said.split("\n")) if line.strip()), "")

    # ------------------------------------------------------------ pipes

    def _write(self, now: float) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        while True:
            if not self._unwritten:
                row = self._delivery.take(now)
                if row is None:
                    return
                number, line = row
                self._unwritten = b'{"number": %d, ' % number + line[1:] + b"\n"
            try:
                count = os.write(process.stdin.fileno(), self._unwritten)
            except OSError:  # It is full, or the process is gone: `_look` finds out.
                return
            self._unwritten = self._unwritten[count:]

    def _read(self, now: float) -> None:
        process = self._process
        assert process is not None
        *lines, self._unread = (self._unread + _whatever_is_in(process.stdout)).split(b"\n")
        for line in lines:
            self._take(json.loads(line), now)
        if os.fstat(self._printed).st_size > PRINTED_BYTES_MAX:
            os.ftruncate(self._printed, 0)

    def _take(self, answer: Json, now: float) -> None:
        if "number" in answer:
            self._delivery.answered(answer["number"], now)
        elif "begun" in answer:
            self._delivery.begun(now)
        else:
            self._error = str(answer["error"])

    def _tell(self) -> None:
        news = (self._delivery.why, self._delivery.dropped)
        if news != self._told and (news[0] or self._told[0]):
            self._post(TrackerTrouble(self._name, *news))
        self._told = news


def _is_readable(fds: Sequence[int], within_s: float) -> bool:
    """Whether one of them can be read in time. They may be above 1023, which `select` refuses: a
    coordinator has one for each daemon.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def _whatever_is_in(pipe: Any) -> bytes:
    """What can be read now, without a wait."""
    found = b""
    with suppress(OSError):
        while piece := os.read(pipe.fileno(), PIECE_BYTES):
            found += piece
    return found
