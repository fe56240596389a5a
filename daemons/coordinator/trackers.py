"""Sends the run's series to trackers, wandb and MLflow: one run of theirs for all workers.

A tracker's package is imported in a process of its own (`daemons/tracker/`), and never here: it
may block, start threads, or end its process. Pipes to it never block; what it does not take waits
in a bounded queue (`dlctl/observe/delivery.py`).
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemons.coordinator.records import Exporter, Outcome
from daemons.loop import Loop
from dlctl.observe.delivery import Delivery
from dlctl.observe.tags import TaggedRows
from dlctl.roles.protocol.effects import TrackerTrouble
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
SAID_BYTES = 2000
"""The end of what a process has printed is kept, for the case that it dies."""


class Trackers(Exporter):
    def __init__(self, directory: Path, names: Sequence[str], loop: Loop) -> None:
        self._rows = TaggedRows()
        self._trackers = [TrackerLink(directory, name, loop.post) for name in names]
        loop.chores.append(self.tend)

    def tend(self) -> None:
        """Start what is to be started, send what waits, and take the answers."""
        now = time.monotonic()
        for tracker in self._trackers:
            tracker.tend(now)

    def add_row(self, at: float, name: str, step: int, values: Json) -> None:
        if found := self._rows.values(at, name, step, values):
            for tracker in self._trackers:
                tracker.add({"series": name, "at": at, "step": step, "values": found})

    def close(self, outcome: Outcome | None) -> None:
        until = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.hurry()
            if outcome is not None:
                tracker.add({"outcome": outcome})
        while left := [tracker for tracker in self._trackers if tracker.pending]:
            now = time.monotonic()
            if now >= until:
                break
            for tracker in left:
                tracker.tend(now)
            select.select([fd for tracker in left for fd in tracker.fds], [], [], LOOK_S)
        for tracker in self._trackers:
            tracker.close(until)


class TrackerLink:
    """The process of one tracker, as long as it lives, and then the next one."""

    def __init__(self, directory: Path, name: str, post: Callable[[TrackerTrouble], None]) -> None:
        self._directory = directory
        self._name = name
        self._post = post
        self._delivery = Delivery()
        self._told = ("", 0)
        """Why rows do not arrive, and how many never will, as posted last."""
        self._process: subprocess.Popen[bytes] | None = None
        self._unwritten = self._unread = self._said = b""
        """The rest of a row, of an answer, and the end of what else the process has printed."""
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

    def add(self, row: Json) -> None:
        self._delivery.add(json.dumps(row).encode())

    def hurry(self) -> None:
        self._delivery.hurry()

    def tend(self, now: float) -> None:
        if self._delivery.may_start(now):
            self._start(now)
        if self._process is not None:
            self._read(now)
            self._write(now)
            self._look(now)
        self._tell()

    def close(self, until: float) -> None:
        """End the process: in order if it has answered everything, and does so in time."""
        if left := self.pending:
            why = self._delivery.why or f"not in {CLOSE_S:g} s"
            log.error("%s did not get the last %s: %s", self._name, plural(left, "row"), why)
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # At that it leaves.
        if not left:
            self._has_ended(process, max(until - time.monotonic(), EXIT_S))
        self._kill(process)

    # ------------------------------------------------------------ the process

    def _start(self, now: float) -> None:
        command = [sys.executable, "-P", "-m", "daemons.tracker"]
        try:
            self._process = subprocess.Popen(
                [*command, str(self._directory), self._name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._delivery.ended(f"cannot start its process: {error.strerror}", now)
            return
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._unwritten = self._unread = self._said = b""
        self._error = ""
        self._delivery.started(now)

    def _look(self, now: float) -> None:
        """Whether the process has ended, or hangs."""
        process = self._process
        assert process is not None
        if self._has_ended(process, 0.0):
            self._read(now)
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
            return bool(select.select([pidfd], [], [], within_s)[0])
        finally:
            os.close(pidfd)

    def _kill(self, process: subprocess.Popen[bytes]) -> int:
        """Kill all that is left of its group: a package may have started processes of its own.
        Returns how the process has ended.
        """
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._process = None
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def _last_words(self) -> str:
        said = redacted(self._said.decode(errors="replace")).split("\n")
        return next((line.strip() for line in reversed(said) if line.strip()), "")

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
        self._said = (self._said + _whatever_is_in(process.stderr))[-SAID_BYTES:]

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


def _whatever_is_in(pipe: Any) -> bytes:
    """What can be read now, without a wait."""
    found = b""
    with suppress(OSError):
        while piece := os.read(pipe.fileno(), PIECE_BYTES):
            found += piece
    return found
