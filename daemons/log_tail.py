"""The last lines of a daemon's log, readable, for reports of its death."""

from __future__ import annotations

import json
import re
from pathlib import Path

LINES = 12
DETAIL_LINES_MAX = 8
"""Of one record, so that its message stays among the last lines despite a deep traceback."""
TAIL_BYTES = 256 * 1024
"""Fits a record with the longest message and the longest traceback, escaped as JSON."""
LINE_CHARS_MAX = 400
ERROR = "ERROR "
_GOODBYE = re.compile(r"exit ([0-9]{1,3}): ")
"""`Loop`'s last line, which contains the exit code."""

_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors for a line that is not a log record of dlctl: user code may have printed anything."""


def last_lines(path: Path) -> tuple[str, ...]:
    """The last dozen lines: messages of JSON lines with the ends of their details, and raw lines.
    If more than a dozen lines follow the last error (as from the task's atexit functions), the
    first line is that error.
    """
    lines = [line for text in _tail(path) for line in _readable(text)]
    before, last = lines[:-LINES], lines[-LINES:]
    errors = [line for line in before if line.startswith(ERROR)]
    if errors and not any(line.startswith(ERROR) for line in last):
        last[0] = errors[-1]
    return tuple(line[:LINE_CHARS_MAX] for line in last)


def exit_code(path: Path) -> int | None:
    """The exit code that a daemon has logged at its end; None if it was killed before."""
    for text in reversed(_tail(path)):
        try:
            goodbye = _GOODBYE.match(json.loads(text)["msg"])
        except _NOT_OURS:
            continue
        if goodbye:
            return int(goodbye[1])
    return None


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _readable(text: str) -> list[str]:
    try:
        record = json.loads(text)
        if _GOODBYE.match(record["msg"]):
            return []
        message = f"{record['level'].upper()} {record['msg']}"
        detail = str(record.get("detail", "")).splitlines()
        if len(detail) > DETAIL_LINES_MAX:
            detail = ["...", *detail[1 - DETAIL_LINES_MAX :]]
        return [message, *detail]
    except _NOT_OURS:
        return [text] if text.strip() else []
