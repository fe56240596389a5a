"""Reading the daemons' logs: from the end, merged by time, and followed through restarts.

    logs/worker-2.4.jsonl      the fourth incarnation of worker-2
    logs/worker-2.4.jsonl.1    its older lines; .2 is older still

A line is JSON with `ts`, `level`, `msg` and more, or text that the process wrote directly (a
traceback, a library's warning). Files are read directly, so the logs of a run without a coordinator
are available.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dlctl.util import notes, regular
from dlctl.util.json_depth import LEVELS_MAX, is_deep
from dlctl.util.regular import NotRegular

LEVELS = ("debug", "info", "warning", "error", "critical")
TEXT = "text"
"""The level of a line that is not JSON. It counts as a warning."""
LINE_BYTES_MAX = 1 << 20
"""A longer line is cut into several."""
_FILE = re.compile(r"(?P<name>[a-z]+(?:-\d+)?)\.(?P<incarnation>\d+)\.jsonl(?:\.(?P<age>\d+))?")


class LogFile(NamedTuple):
    path: Path
    name: str
    incarnation: int
    age: int
    """0: the current file; 1, 2 ...: rotated, higher is older."""
    inode: int
    """The inode of the file with this name at the time of listing."""
    nbytes: int
    """The size at the time of listing. What is written later is for the next listing."""

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.name, self.incarnation, self.inode


@dataclass(slots=True)
class Line:
    name: str
    incarnation: int
    at: float
    """Seconds since 1970; that of the previous line if it has no time."""
    level: str
    text: str
    fields: dict[str, Any]
    raw: str
    """The unmodified line."""

    @property
    def severity(self) -> int:
        """Index in LEVELS; an unknown level counts as a warning, so that it is not overlooked."""
        return LEVELS.index(self.level) if self.level in LEVELS else LEVELS.index("warning")


def list_files(run_directory: Path) -> dict[str, list[LogFile]]:
    """Daemon -> its log files, oldest first."""
    found: dict[str, list[LogFile]] = {}
    for path in sorted((run_directory / "logs").glob("*.jsonl*")):
        match = _FILE.fullmatch(path.name)
        if not match:
            continue
        name, incarnation, age = match["name"], int(match["incarnation"]), int(match["age"] or 0)
        with suppress(FileNotFoundError):  # rotated away just now
            info = path.stat()
            file = LogFile(path, name, incarnation, age, info.st_ino, info.st_size)
            found.setdefault(name, []).append(file)
    for files in found.values():
        files.sort(key=lambda file: (file.incarnation, -file.age))
    return found


def parse(raw: str, name: str, incarnation: int, before: float) -> Line:
    """One line of a log file; `before` is the time of the previous line."""
    try:
        fields = json.loads(raw) if raw.startswith("{") else None
        if raw.count("[") + raw.count("{") > LEVELS_MAX and is_deep(fields):
            fields = None
        at = _seconds(fields.pop("ts")) if fields else before
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("msg"), str):
        shown = raw.rpartition("\r")[2] or raw  # a progress bar: its last state
        return Line(name, incarnation, before, TEXT, shown, {}, raw)
    level, text = str(fields.pop("level", "info")).lower(), fields.pop("msg")
    fields.pop("name", None)
    fields.pop("inc", None)
    return Line(name, incarnation, at, level, text, fields, raw)


def _seconds(time: str) -> float:
    """Seconds since 1970. Raises ValueError, also for a time that cannot be shown in UTC."""
    at = datetime.fromisoformat(time).timestamp()
    datetime.fromtimestamp(at, UTC)
    return at


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
        except NotRegular as error:
            notes.warn(f"no log can be read from {file.path}: {error.strerror}")
            continue
        chosen[:0] = lines if left is None else lines[-left:]
    return chosen


def read(file: LogFile, last: int | None = None) -> Iterator[Line]:
    """Lines of one file, oldest first: all, or only the `last` ones, read from the end."""
    with regular.opened(file.path) as stream:
        info = os.fstat(stream.fileno())
        at, end = info.st_mtime, min(file.nbytes, info.st_size)
        if last is not None and end:
            with mmap.mmap(stream.fileno(), end, access=mmap.ACCESS_READ) as mapped:
                stream.seek(_start_of_last(mapped, last))
        while data := stream.readline(min(LINE_BYTES_MAX, end - stream.tell())):
            line = parse(_text(data), file.name, file.incarnation, at)
            at = line.at
            yield line


def _start_of_last(data: mmap.mmap, lines: int) -> int:
    """The offset of the last `lines` lines, of which the very last one may have no line feed."""
    at = len(data) - 1
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").rstrip("\r\n")


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Merged by time. Lines of one daemon keep their order even if its clock was set back."""
    latest: dict[str, float] = {}
    keyed = []
    for line in lines:
        latest[line.name] = max(line.at, latest.get(line.name, line.at))
        keyed.append((latest[line.name], line))
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]


def last_log_lines(run_directory: Path, name: str, limit: int = 10) -> list[str]:
    """The last lines of a daemon's newest log, as text for an error message."""
    files = list_files(run_directory).get(name, [])
    newest = [file for file in files if file.incarnation == files[-1].incarnation]
    return [line.text for line in tail(newest, limit)]


# ---------------------------------------------------------------- following


class Follower:
    """New lines of some daemons at each poll, across rotation and restarts.

    Rotation renames files and removes old ones, so they are identified by inode. None stays open: a
    run may have more files than a process may have descriptors.
    """

    def __init__(self, run_directory: Path, names: Collection[str]) -> None:
        """`names` may be daemons that have yet to start."""
        self.run_directory = run_directory
        self.names = names
        self._past = [[*files[:-1], _whole_lines(files[-1])] for files in self._files()]
        self._offsets = {file.identity: file.nbytes for files in self._past for file in files}
        """How far each file has been read."""

    def _files(self) -> list[list[LogFile]]:
        found = list_files(self.run_directory)
        return [files for name, files in found.items() if name in self.names]

    def past(self, limit: int | None, wanted: Callable[[Line], bool] | None) -> list[Line]:
        """The `tail` of each daemon, merged by time: all lines before those of the first poll."""
        return in_order(line for files in self._past for line in tail(files, limit, wanted))

    def poll(self, *, at_end: bool = False) -> list[Line]:
        """New lines since the last poll, merged by time; with `at_end`, also a last line without a
        line feed.
        """
        lines = []
        for files in self._files():
            for file in files:
                if (found := self._read(file, at_end)) is None:
                    break  # The next poll finds this part and the later ones, in order.
                lines += found
        return in_order(lines)

    def rest(self) -> list[Line]:
        """The final poll. A rotation may hide a part once."""
        return in_order([*self.poll(), *self.poll(at_end=True)])

    def _read(self, file: LogFile, at_end: bool) -> list[Line] | None:
        """The new lines of a file; None if another file has its name by now."""
        offset, lines = self._offsets.get(file.identity, 0), list[Line]()
        if file.nbytes == offset:
            return lines
        try:
            with regular.opened(file.path) as stream:
                info = os.fstat(stream.fileno())
                if info.st_ino != file.inode:
                    return None
                if info.st_size < offset:  # truncated
                    offset = 0
                stream.seek(offset)
                at = info.st_mtime
                while data := stream.readline(LINE_BYTES_MAX):
                    if not (at_end or data.endswith(b"\n") or len(data) == LINE_BYTES_MAX):
                        break  # Its rest is yet to come.
                    offset += len(data)
                    lines.append(parse(_text(data), file.name, file.incarnation, at))
                    at = lines[-1].at
        except FileNotFoundError:
            return None
        self._offsets[file.identity] = offset
        return lines


def _whole_lines(file: LogFile) -> LogFile:
    """The file up to the end of its last whole line: a daemon may be writing the next one."""
    with suppress(OSError), regular.opened(file.path) as stream:
        stream.seek(max(0, file.nbytes - LINE_BYTES_MAX))
        data = stream.read(file.nbytes - stream.tell())
        if (end := data.rfind(b"\n") + 1) or len(data) < LINE_BYTES_MAX:
            return file._replace(nbytes=file.nbytes - len(data) + end)
    return file
