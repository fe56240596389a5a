"""The last lines of a daemon's log, readable, for reports of its death."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlctl.runs import logs
from dlctl.util import regular

LINES = 12
DETAIL_LINES_MAX = 8
"""Of one record, so that its message stays among the last lines despite a deep traceback."""
TAIL_BYTES = 256 * 1024
"""Fits a record with the longest message and the longest traceback, escaped as JSON."""
LINE_CHARS_MAX = 400
ERROR = "ERROR "
_GOODBYE = re.compile(r"exit ([0-9]{1,3}): ")
"""`Loop`'s last line, which contains the exit code."""


def last_lines(path: Path) -> tuple[str, ...]:
    """The last dozen lines: messages of JSON lines with the ends of their details, and raw lines.
    If more than a dozen lines follow the last error (as from the task's atexit functions), the
    first line is that error.
    """
    lines = [text for line in _tail(path) for text in _readable(line)]
    before, last = lines[:-LINES], lines[-LINES:]
    errors = [line for line in before if line.startswith(ERROR)]
    if errors and not any(line.startswith(ERROR) for line in last):
        last[0] = errors[-1]
    return tuple(line[:LINE_CHARS_MAX] for line in last)


def exit_code(path: Path) -> int | None:
    """The exit code that a daemon has logged at its end; None if it was killed before."""
    for line in reversed(_tail(path)):
        if goodbye := _goodbye(line):
            return int(goodbye[1])
    return None


def _tail(path: Path) -> list[logs.Line]:
    try:
        with regular.opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [logs.parse(line, "", 0, 0.0) for line in lines]


def _goodbye(line: logs.Line) -> re.Match[str] | None:
    return None if line.level == logs.TEXT else _GOODBYE.match(line.text)


def _readable(line: logs.Line) -> list[str]:
    if line.level == logs.TEXT:
        return [line.text] if line.text.strip() else []
    if _goodbye(line):
        return []
    detail = str(line.fields.get("detail", "")).splitlines()
    if len(detail) > DETAIL_LINES_MAX:
        detail = ["...", *detail[1 - DETAIL_LINES_MAX :]]
    return [f"{line.level.upper()} {line.text}", *detail]
