"""Rows on their way to a tracker, through a process that may die, hang or never begin. Pure.

The process answers every row that its tracker has. A new process gets again what was not answered,
and itself leaves out what its predecessor has noted (`daemons/tracker/`). The queue is bounded: of
a tracker that is away for longer the oldest rows are dropped, and counted.
"""

from __future__ import annotations

from collections import deque

ROWS_MAX = 2000
"""Rows that wait: about half an hour, one a second."""
WINDOW = 64
"""Rows at most that are under way, unanswered."""
BEGIN_S = 300.0
"""From the start of a process until its tracker has answered: imports, a login, a new database,
which may be broken if it is not finished.
"""
ANSWER_S = 60.0
"""From the oldest row under way to the next answer."""
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 300.0
"""Before a process is started again; doubles while none delivers a row."""


class Delivery:
    """When a process is to be started or killed, and what it is to be sent. Times in seconds, of
    any clock that never goes back.
    """

    def __init__(self, answer_s: float | None = None, pause_max_s: float | None = None) -> None:
        """Other limits than ANSWER_S and PAUSE_MAX_S."""
        self._answer_s, self._pause_max_s = answer_s, pause_max_s
        self.dropped = 0
        """Rows that the tracker will never get."""
        self.why = ""
        """Why rows do not arrive; "" if they do."""
        self._rows: deque[tuple[int, bytes]] = deque()
        """(number, line), the oldest one first: those under way, then those that wait."""
        self._under_way = 0
        self._number = 0
        self._failures = 0
        """Of processes, since one has delivered a row."""
        self._start_at: float | None = 0.0
        """When a process is to be started; None: there is one."""
        self._heard_at = 0.0
        self.has_begun = False
        """The process has its tracker."""

    @property
    def pending(self) -> int:
        """Rows that the tracker does not have yet."""
        return len(self._rows)

    def add(self, line: bytes) -> int:
        """Queue a row; returns its number. If there are too many, the oldest that waits is
        dropped.
        """
        if len(self._rows) >= ROWS_MAX:
            del self._rows[self._under_way]
            self.dropped += 1
        self._number += 1
        self._rows.append((self._number, line))
        return self._number

    def take(self, now: float) -> tuple[int, bytes] | None:
        """The next row to send, which is under way from now on; None for now."""
        if (
            self._start_at is not None
            or self._under_way >= WINDOW
            or self._under_way == len(self._rows)
        ):
            return None
        if self.has_begun and self._under_way == 0:
            self._heard_at = now
        row = self._rows[self._under_way]
        self._under_way += 1
        return row

    # ------------------------------------------------------------ the process

    def may_start(self, now: float) -> bool:
        return self._start_at is not None and now >= self._start_at

    def started(self, now: float) -> None:
        self._start_at, self._heard_at = None, now
        self.has_begun, self._under_way = False, 0

    def begun(self, now: float) -> None:
        self.has_begun, self._heard_at = True, now
        if not self._under_way and not self._rows:
            self.why = ""

    def answered(self, number: int, now: float) -> None:
        """The tracker has all rows up to this number."""
        while self._under_way and self._rows[0][0] <= number:
            self._rows.popleft()
            self._under_way -= 1
            self._failures, self.why = 0, ""
        self._heard_at = now

    def heard(self, now: float) -> None:
        """It is at work on a row, which takes long."""
        self._heard_at = now

    def is_late(self, now: float) -> bool:
        """Whether the process hangs, and is to be killed."""
        if self._start_at is not None:
            return False
        waited_s = now - self._heard_at
        if not self.has_begun:
            return waited_s > BEGIN_S
        answer_s = ANSWER_S if self._answer_s is None else self._answer_s
        return self._under_way > 0 and waited_s > answer_s

    def ended(self, why: str, now: float) -> None:
        """The process is gone, or could not be started."""
        most_s = PAUSE_MAX_S if self._pause_max_s is None else self._pause_max_s
        pause_s = min(PAUSE_FIRST_S * 2**self._failures, most_s)
        self._failures = min(self._failures + 1, 16)
        self._start_at, self._under_way, self.has_begun = now + pause_s, 0, False
        self.why = why

    def hurry(self) -> None:
        """Start without a pause: the run is over."""
        if self._start_at is not None:
            self._start_at = 0.0
