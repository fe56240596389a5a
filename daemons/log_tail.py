"""The last lines of a daemon's log, as a person would want to read them after its death."""

from __future__ import annotations

import json
import re
from pathlib import Path

LINES = 12
TAIL_BYTES = 32 * 1024
LINE_CHARS_MAX = 400
_GOODBYE = re.compile(r"exit ([0-9]{1,3}): ")
"""What `Loop` writes at the end: whoever reads last words knows the exit code."""

_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Of a line that looks like JSON and is none of ours: the user's code may have printed anything."""


def last_lines(path: Path) -> tuple[str, ...]:
    """The last dozen lines: messages of JSON lines with their details, raw lines as they are."""
    lines = [line for text in _tail(path) for line in _readable(text)]
    return tuple(line[:LINE_CHARS_MAX] for line in lines[-LINES:])


def exit_code(path: Path) -> int | None:
    """The exit code that a daemon has written at its end; None if it was cut short."""
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
        return [message, *str(record.get("detail", "")).splitlines()]
    except _NOT_OURS:
        return [text] if text.strip() else []
