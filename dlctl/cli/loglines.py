"""Log lines on the terminal: whose, when, how grave, what; and where a daemon restarted."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from dlctl.cli import console, lives, values
from dlctl.cli.logfiles import TEXT, Line

_PALETTE = (39, 75, 114, 141, 44, 176, 108, 147, 37, 180)
"""Of 256 colours: neither red nor yellow, which mean levels."""
_LEVELS = {"warning": "WARN", "critical": "ERROR"}
_LEVEL_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}
DETAIL = "detail"
"""The field of a line that holds a traceback."""
_NO_TIME = " " * len("14:47:35.120")


class Printer:
    """Prints lines in one of three shapes and remembers which incarnation it was at."""

    def __init__(self, directory: Path, names: Collection[str], shape: str = "text") -> None:
        """For lines of these daemons of a run; `shape` is "text", "raw" (no prefix) or "json"."""
        self.directory = directory
        self.width = max(map(len, names), default=0)
        self.shape = shape
        self.incarnations: dict[str, int] = {}
        self.ends: dict[tuple[str, int], lives.End] = {}

    def show(self, lines: Iterable[Line], *, flush: bool = False) -> None:
        for line in lines:
            if self.shape == "text":
                self._separate(line)
                console.out(self.text(line))
            elif self.shape == "json":
                console.out_json("dlctl.log/1", as_data(line))
            else:
                console.out(console.escape(line.raw) if console.is_tty() else line.raw)
        if flush:
            console.flush()

    def text(self, line: Line) -> str:
        """One line, as in "worker-1 | 14:47:35.661 WARN  behind by 6 steps"."""
        prefix = self._prefix(line.name)
        if line.level == TEXT:
            return f"{prefix} {_NO_TIME} {TEXT:<5} {console.escape(line.text)}"
        level = console.escape(_LEVELS.get(line.level, line.level.upper()))
        colored = console.style(f"{level:<5}", fg=_LEVEL_COLORS.get(line.level))
        fields = {key: value for key, value in line.fields.items() if key != DETAIL}
        extra = "".join(f"  {_field(key, value)}" for key, value in fields.items())
        shown = console.escape(line.text) + console.style(extra, dim=True)
        first = f"{prefix} {values.clock(line.at, time.time())} {colored} {shown}"
        detail = str(line.fields.get(DETAIL) or "").splitlines()
        rest = [f"{prefix} {_NO_TIME} {'':<5} {console.escape(text)}" for text in detail]
        return "\n".join([first, *rest])

    def _prefix(self, name: str) -> str:
        color = _PALETTE[zlib.crc32(name.encode()) % len(_PALETTE)]
        return console.style(f"{name:<{self.width}} |", fg=color)

    def _separate(self, line: Line) -> None:
        """Say where a daemon died and came back: else two lives look like one."""
        before = self.incarnations.get(line.name)
        self.incarnations[line.name] = line.incarnation
        if before is None or before == line.incarnation:
            return
        if (line.name, before) not in self.ends:
            self.ends = lives.load(self.directory).ends
        end = self.ends.get((line.name, before))
        how = f"ended: {end.how}; " if end is not None else ""
        self.mark(line.name, line.at, f"{how}incarnation {line.incarnation} starts")

    def mark(self, name: str, at: float | None, text: str) -> None:
        """A line between lines, in the shape for people only: what happened to the daemon."""
        if self.shape == "text":
            when = values.clock(at, time.time()) if at is not None else _NO_TIME
            console.out(f"{self._prefix(name)} {when} ----  {console.escape(text)}")


def as_data(line: Line) -> dict[str, Any]:
    """One line for `--json`: its own fields, and whose it is."""
    own: dict[str, Any] = {"name": line.name, "inc": line.incarnation}
    if line.level == TEXT:
        return {**own, "stream": TEXT, "msg": line.text}
    return {
        **line.fields,
        **own,
        "ts": values.rfc3339(line.at),
        "level": line.level,
        "msg": line.text,
    }


def _field(key: str, value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value)
    return console.escape(f"{key}={shown}")


def wanted(
    level: str | None,
    since: float | None,
    until: float | None,
    search: Callable[[str], object] | None,
) -> Callable[[Line], bool] | None:
    """A test for lines that somebody asked for; None if all are wanted."""
    from dlctl.cli.logfiles import LEVELS

    if level is None and since is None and until is None and search is None:
        return None
    least = LEVELS.index(level) if level else 0

    def test(line: Line) -> bool:
        return (
            line.severity >= least
            and (since is None or line.at >= since)
            and (until is None or line.at <= until)
            and (search is None or bool(search(line.text)))
        )

    return test
