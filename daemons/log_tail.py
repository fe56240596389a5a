"""The last lines of a daemon's log, readable, for reports of its death."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from dlctl.runs import logs
from dlctl.util import regular

LINES = 12
DETAIL_LINES_MAX = 8
"""Lines shown of one record, so that its message is among the last despite a deep traceback."""
TAIL_BYTES = 256 * 1024
"""Fits a record with the longest message and the longest traceback, escaped as JSON."""
LINE_CHARS_MAX = 400
PRINTED_S_MAX, LOOK_S = 1.0, 0.002
ERROR = "ERROR "
CRASHED = "Fatal Python error: "
"""How faulthandler's output begins on standard error."""
_GOODBYE = re.compile(r"exit ([0-9]{1,3}): ")
"""`Loop`'s last line, which contains the exit code."""


def await_printed(path: Path) -> None:
    """Wait until all that a process has printed is in its log, after its exit: the process that
    writes it there (`daemons.worker.task.print_reader`) holds a lock on the log, and exits soon.
    """
    deadline = time.monotonic() + PRINTED_S_MAX
    with suppress(OSError), open(regular.descriptor(path, os.O_RDWR), "rb") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_S)
            else:
                return


def last_lines(path: Path) -> tuple[str, ...]:
    """The last dozen lines: messages of JSON lines with the ends of their details, and what was
    printed. If more than a dozen lines follow the last error (as from the task's atexit functions),
    the first line is that error. Of a crash they are the beginning of what faulthandler wrote.
    """
    lines = [text for line in _tail(path) for text in _readable(line)]
    last = _of_crash(lines) or lines[-LINES:]
    errors = [line for line in lines[:-LINES] if line.startswith(ERROR)]
    if errors and not any(line.startswith((ERROR, CRASHED)) for line in last):
        last[0] = errors[-1]
    return tuple(line[:LINE_CHARS_MAX] for line in last)


def _of_crash(lines: list[str]) -> list[str]:
    """The error and the frames of its thread, innermost first; [] if the last error is another."""
    newest = next((line for line in reversed(lines) if line.startswith((ERROR, CRASHED))), "")
    if not newest.startswith(CRASHED):
        return []
    dump = lines[len(lines) - 1 - lines[::-1].index(newest) :]
    threads = (n for n, line in enumerate(dump) if line.startswith("Current thread "))
    return [newest, *dump[next(threads, 0) + 1 :]][:LINES]


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
    return None if _is_printed(line) else _GOODBYE.match(line.text)


def _is_printed(line: logs.Line) -> bool:
    return line.level == logs.TEXT or "stream" in line.fields


def _readable(line: logs.Line) -> list[str]:
    if _is_printed(line) and not line.text.startswith(ERROR):  # That would look like our own.
        return [line.text] if line.text.strip() else []
    if _goodbye(line):
        return []
    detail = str(line.fields.get("detail", "")).splitlines()
    if len(detail) > DETAIL_LINES_MAX:
        detail = ["...", *detail[1 - DETAIL_LINES_MAX :]]
    return [f"{line.level.upper()} {line.text}", *detail]
