"""Lines of what a worker prints: cut from bytes, and limited if they are too many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from daemons.log_file import LINE_CHARS_MAX

MOMENT_S = 1.0
"""After this time without output an unfinished line is a line."""
BAR_S = 10.0
"""Interval between two lines of a progress bar, which rewrites an unfinished line all the time."""
BYTES_PER_S_MAX = 4 << 20
"""The log's growth in the long run: it has room for a minute of that."""
BURST_BYTES_MAX = 32 << 20
LINE_OVERHEAD_BYTES = 120
"""The size of the JSON around a line in the log."""


class Lines:
    """The lines of one stream."""

    def __init__(self) -> None:
        self._begun = b""
        """The unfinished line, or its beginning, if it is long."""
        self._is_shown = False
        """A beginning of the unfinished line was returned."""
        self.due = math.inf
        """When the unfinished line counts as a line."""

    def feed(self, data: bytes, now: float) -> list[str]:
        """Feed bytes to the stream; returns the lines that end in them."""
        *whole, rest = (self._begun + data).split(b"\n")
        shown = [_visible(line) for line in whole]
        if shown and self._is_shown and not shown[0]:
            del shown[0]  # Only the end of a line that was returned.
        self._begin(rest, now, is_new=bool(whole))
        return [_text(line) for line in shown]

    def skip(self, data: bytes, now: float) -> int:
        """Drop the lines that end in these bytes; returns how many."""
        rest = (self._begun + data).rpartition(b"\n")[2]
        count = data.count(b"\n")
        self._begin(rest, now, is_new=count > 0)
        return count

    def _begin(self, rest: bytes, now: float, *, is_new: bool) -> None:
        self._is_shown &= not is_new
        was_bar = not is_new and b"\r" in self._begun
        before, mark, current = rest.rpartition(b"\r")
        if mark:
            rest = _visible(before) + mark + current
        if not rest:
            self.due = math.inf
        elif not mark:
            self.due = now + MOMENT_S
        elif not was_bar:
            self.due = now + BAR_S
        self._begun = rest[: 4 * LINE_CHARS_MAX]

    def end(self) -> list[str]:
        """The unfinished line, if there is one. Its rest will be another line."""
        begun, self._begun, self.due = _visible(self._begun), b"", math.inf
        self._is_shown |= bool(begun)
        return [_text(begun)] if begun else []


def _visible(line: bytes) -> bytes:
    r"""What a terminal shows of a line: what follows the last \r, as in a progress bar."""
    if b"\r" not in line:
        return line
    states = (state for state in reversed(line.split(b"\r")) if state.strip())
    return next(states, b"")


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")[:LINE_CHARS_MAX]


class Limit:
    """How much of a flood is logged: `BURST_BYTES_MAX`, then `BYTES_PER_S_MAX`. Once that is
    exceeded, everything is dropped until there is room for a second's worth.
    """

    def __init__(self, now: float) -> None:
        self._room = float(BURST_BYTES_MAX)
        self._at = now
        self._is_over = False

    def is_over(self, now: float) -> bool:
        """Whether lines have to be dropped now."""
        more = (now - self._at) * BYTES_PER_S_MAX
        self._room, self._at = min(self._room + more, BURST_BYTES_MAX), now
        self._is_over = self._room < (BYTES_PER_S_MAX if self._is_over else 0)
        return self._is_over

    def spend(self, lines: Sequence[str]) -> None:
        self._room -= sum(map(len, lines)) + LINE_OVERHEAD_BYTES * len(lines)
