"""Reading the daemons' logs: from the end, merged by time, and followed through restarts.

    logs/worker-2.4.jsonl      the fourth incarnation of worker-2
    logs/worker-2.4.jsonl.1    its older lines; .2 is older still

A line is JSON with `ts`, `level`, `msg` and more, or it is text that the process wrote by itself
(a traceback, a warning of a library). Files are read directly, so logs can be had from a run whose
coordinator is gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from dlctl.util.json_depth import is_deep

LEVELS = ("debug", "info", "warning", "error", "critical")
TEXT = "text"
"""The level of a line that is not JSON. It counts as a warning."""
LINE_BYTES_MAX = 1 << 20
"""A longer line is cut into several."""
LEVELS_MAX = 64
"""A line whose JSON is nested more deeply is text."""
_BLOCK_BYTES = 1 << 16
_FILE = re.compile(r"(?P<name>[a-z]+(?:-\d+)?)\.(?P<incarnation>\d+)\.jsonl(?:\.(?P<age>\d+))?")


class LogFile(NamedTuple):
    path: Path
    name: str
    incarnation: int
    age: int
    """0: is written now; 1, 2 ...: rotated away, the higher the older."""


@dataclass(slots=True)
class Line:
    name: str
    incarnation: int
    at: float
    """Seconds since 1970; that of the line before it if it carries no time."""
    level: str
    text: str
    fields: dict[str, Any]
    raw: str
    """As it stands in the file."""

    @property
    def severity(self) -> int:
        """Index in LEVELS; an unknown level counts as a warning, so that it is not overlooked."""
        return LEVELS.index(self.level) if self.level in LEVELS else LEVELS.index("warning")


def list_files(run_directory: Path) -> dict[str, list[LogFile]]:
    """Daemon -> its log files, oldest first."""
    found: dict[str, list[LogFile]] = {}
    for path in sorted((run_directory / "logs").glob("*.jsonl*")):
        match = _FILE.fullmatch(path.name)
        if match:
            name, incarnation, age = match["name"], int(match["incarnation"]), match["age"]
            file = LogFile(path, name, incarnation, int(age or 0))
            found.setdefault(name, []).append(file)
    for files in found.values():
        files.sort(key=lambda file: (file.incarnation, -file.age))
    return found


def parse(raw: str, name: str, incarnation: int, before: float) -> Line:
    """One line of a log file; `before` is the time of the line before it."""
    try:
        fields = json.loads(raw) if raw.startswith("{") else None
        fields = None if _is_deep(raw, fields) else fields
        at = _seconds(fields.pop("ts")) if fields else before
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("msg"), str):
        shown = raw.rpartition("\r")[2] or raw  # a progress bar: what it showed last
        return Line(name, incarnation, before, TEXT, shown, {}, raw)
    level, text = str(fields.pop("level", "info")).lower(), fields.pop("msg")
    fields.pop("name", None)
    fields.pop("inc", None)
    return Line(name, incarnation, at, level, text, fields, raw)


def _seconds(time: str) -> float:
    """Seconds since 1970. Raises ValueError, too, for a time that could not be shown in UTC."""
    at = datetime.fromisoformat(time).timestamp()
    datetime.fromtimestamp(at, UTC)
    return at


def _is_deep(raw: str, fields: Any) -> bool:
    """Whether a line of JSON may be nested more deeply than what is done with it can follow."""
    return raw.count("[") + raw.count("{") > LEVELS_MAX and is_deep(fields, LEVELS_MAX)


def tail(
    files: Iterable[LogFile], limit: int | None, wanted: Callable[[Line], bool] | None = None
) -> list[Line]:
    """The last `limit` lines (None: all) of one daemon's files for which `wanted` is true."""
    chosen: list[Line] = []
    for file in reversed(list(files)):
        left = None if limit is None else limit - len(chosen)
        if left == 0:
            break
        try:
            lines = list(read(file, left) if wanted is None else filter(wanted, read(file)))
        except FileNotFoundError:  # rotated away since it was listed
            continue
        chosen[:0] = lines if left is None else lines[-left:]
    return chosen


def read(file: LogFile, last: int | None = None) -> Iterator[Line]:
    """Lines of one file, oldest first: all, or the `last` ones without reading what is before."""
    with file.path.open("rb") as stream:
        at = os.fstat(stream.fileno()).st_mtime
        stream.seek(0 if last is None else _start_of_last(stream, last))
        for data in iter(lambda: stream.readline(LINE_BYTES_MAX), b""):
            line = parse(_text(data), file.name, file.incarnation, at)
            at = line.at
            yield line


def _start_of_last(stream: IO[bytes], lines: int) -> int:
    """Where the last `lines` lines begin. 0 lines: where a line that is half written begins."""
    position = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, position - 1))
    left = lines + 1 if stream.read() == b"\n" else max(lines, 1)
    while position > 0:
        start = max(0, position - _BLOCK_BYTES)
        stream.seek(start)
        block = stream.read(position - start)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if left == 0:
                return start + at + 1
        position = start
    return 0


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").rstrip("\r\n")


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Merged by time. Lines of one daemon keep their order even where its clock went back."""
    latest: dict[str, float] = {}
    keyed = []
    for line in lines:
        latest[line.name] = max(line.at, latest.get(line.name, line.at))
        keyed.append((latest[line.name], line))
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]


def last_words(run_directory: Path, name: str, limit: int = 10) -> list[str]:
    """The last lines of a daemon's newest log, as text for an error message."""
    files = list_files(run_directory).get(name, [])
    newest = [file for file in files if file.incarnation == files[-1].incarnation]
    return [line.text for line in tail(newest, limit)]


# ---------------------------------------------------------------- following


class Follower:
    """New lines of some daemons, poll by poll, through rotation and restarts; close it.

    Rotation renames files and removes old ones: each is known by its inode, which stays its own for
    as long as it is open here.
    """

    def __init__(self, run_directory: Path, names: Collection[str], last: int | None = 0) -> None:
        """The first poll begins with the `last` lines (None: all) of each daemon's newest file.

        `names` may be daemons that have yet to start.
        """
        self.run_directory = run_directory
        self.names = names
        self._open: dict[int, _Open] = {}
        self._begun: set[int] = set()
        found = list(self._files())
        self._oldest = {file.name: file.incarnation for file in found}
        newest = {file.name: file for file in found}
        for file in found:
            self._add(file, last if file == newest[file.name] else 0)
        if last != 0:
            self._begun = {
                inode for inode, one in self._open.items() if one.file in newest.values()
            }

    def _files(self) -> Iterator[LogFile]:
        for name, files in list_files(self.run_directory).items():
            if name in self.names:
                yield from files

    def _add(self, file: LogFile, last: int | None) -> None:
        """Open it, if it is not: what an incarnation before the oldest one wrote is past."""
        if file.incarnation < self._oldest.get(file.name, 0):
            return
        with suppress(FileNotFoundError):  # just being rotated: the next poll finds it
            stream = file.path.open("rb")
            info = os.fstat(stream.fileno())
            if info.st_ino in self._open:
                stream.close()
                return
            stream.seek(0 if last is None else _start_of_last(stream, last))
            self._open[info.st_ino] = _Open(file, stream, info.st_mtime)

    def begins_with(self, file: LogFile) -> bool:
        """Whether the first poll brings (or brought) lines that had been in this file before."""
        try:
            return file.path.stat().st_ino in self._begun
        except FileNotFoundError:
            return False

    def poll(self) -> list[Line]:
        """Lines that have come since the last poll, merged by time."""
        for file in self._files():  # the oldest part of a new incarnation comes first
            self._add(file, None)
        lines = []
        for inode, one in list(self._open.items()):
            lines += one.read()
            if not os.fstat(one.stream.fileno()).st_nlink:
                lines += one.unfinished()
                self._open.pop(inode).stream.close()
        return in_order(lines)

    def rest(self) -> list[Line]:
        """The same at the end, with last lines that lack their line feed."""
        return self.poll() + [line for one in self._open.values() for line in one.unfinished()]

    def close(self) -> None:
        for one in self._open.values():
            one.stream.close()
        self._open.clear()


@dataclass(slots=True)
class _Open:
    file: LogFile
    stream: IO[bytes]
    at: float
    part: bytes = b""
    """Of a line that has not come to its end."""

    def read(self) -> list[Line]:
        data = self.part + self.stream.read()
        whole, found, self.part = data.rpartition(b"\n")
        lines = [self._line(line) for line in whole.split(b"\n")] if found else []
        return lines + (self.unfinished() if len(self.part) > LINE_BYTES_MAX else [])

    def unfinished(self) -> list[Line]:
        part, self.part = self.part, b""
        return [self._line(part)] if part else []

    def _line(self, data: bytes) -> Line:
        line = parse(_text(data), self.file.name, self.file.incarnation, self.at)
        self.at = line.at
        return line
