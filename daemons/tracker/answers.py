"""Answers to the coordinator: what has been answered is not sent again, should this process die.

A package may keep rows in memory for a while. They are noted and answered after that time, or when
its run is closed.
"""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import suppress
from typing import Any

from daemons.tracker.notes import TrackerNotes


class TrackerAnswers:
    def __init__(self, fd: int, notes: TrackerNotes) -> None:
        self._fd = fd
        self._notes = notes
        self._held: deque[tuple[float, int, dict[str, Any]]] = deque()
        """(when, number of a row, what is to be noted with it), the oldest one first."""

    def say(self, **facts: Any) -> None:
        with suppress(OSError):  # The coordinator is gone: there is nobody to tell.
            os.write(self._fd, json.dumps(facts).encode() + b"\n")

    def hold(self, number: int, until: float) -> None:
        """The package has all rows up to this number, and will have written them by then."""
        self._held.append((until, number, self._notes.known()))

    def release(self, now: float) -> None:
        """Note and answer what is written by now. Raises OSError."""
        newest = None
        while self._held and self._held[0][0] <= now:
            newest = self._held.popleft()
        if newest is not None:
            _, number, known = newest
            self._notes.write(known)
            self.say(number=number)
