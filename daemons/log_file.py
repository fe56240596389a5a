"""A daemon's log file, in JSON lines. The processes of the daemon append to it. The daemon itself
rotates it: it renames the file and points its descriptors at a new one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlctl.util import regular

FILE_BYTES_MAX = 50_000_000
FILES_KEPT = 5
LINE_CHARS_MAX = 16 * 1024
LOOK_S = 0.001
_APPENDING = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT


def json_line(
    at: float, level: str, name: str, incarnation: int, text: str, fields: Mapping[str, Any]
) -> str:
    """{"ts", "level", "name", "inc", "msg", ...} and `fields`. A task's own "ts", or any other of
    our keys, becomes "extra.ts".
    """
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    line: dict[str, Any] = {
        "ts": when.replace("+00:00", "Z"),
        "level": level,
        "name": name,
        "inc": incarnation,
        "msg": text[:LINE_CHARS_MAX],
    }
    ours = {*line, "schema"}  # The latter is that of `logs --json`.
    line |= {f"extra.{key}" if key in ours else key: value for key, value in fields.items()}
    return json.dumps(line, default=str)


class DaemonLogFile:
    def __init__(self, path: Path, *descriptors: int) -> None:
        """descriptors: all of this process that refer to the file."""
        self.path = path
        self.descriptors = descriptors
        self._owner = os.getpid()

    def write(self, lines: str) -> None:
        """Append lines, each with its line feed. Raises OSError if the disk is full."""
        text = ("\n" if self._is_torn() else "") + lines
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[os.write(self.descriptors[0], left) :]

    def _is_torn(self) -> bool:
        """Whether the last line has no end: the disk was full, or it is raw output. Looks twice, as
        another process may be writing. If two end it at once, there is an empty line.
        """
        with suppress(OSError):  # The descriptor cannot be read.
            for _ in range(2):
                nbytes = os.fstat(self.descriptors[0]).st_size
                if not nbytes or os.pread(self.descriptors[0], 1, nbytes - 1) == b"\n":
                    return False
                time.sleep(LOOK_S)
            return True
        return False

    def leave_streams(self) -> None:
        """Give it a descriptor of its own, as 1 and 2 are about to refer to something else."""
        self.descriptors = (os.dup(self.descriptors[0]),)

    def rotate_if_full(self) -> None:
        """Rotate the file if it is full. Raises OSError. A forked process never rotates: its
        descriptor still points at the full file after a rotation, so each of its lines would rotate
        again.
        """
        is_full = os.fstat(self.descriptors[0]).st_size >= FILE_BYTES_MAX
        if is_full and os.getpid() == self._owner and self.path.exists():
            self._rotate()

    def _rotate(self) -> None:
        """Create the new file first: if that fails, the old one must keep its name."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        new = regular.descriptor(fresh, _APPENDING, 0o644)
        try:
            push_back(self.path)
            fresh.rename(self.path)
            self._refer_to(new)
        finally:
            os.close(new)
            fresh.unlink(missing_ok=True)

    def follow(self) -> None:
        """`reopen` the file if another process has rotated it."""
        with suppress(OSError):
            now, mine = os.stat(self.path), os.fstat(self.descriptors[0])
            if (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
                self.reopen()

    def reopen(self) -> None:
        """Refer to the file that has the name now, and hold a lock on it. Raises OSError."""
        new = regular.descriptor(self.path, _APPENDING & ~os.O_CREAT)
        try:
            with suppress(OSError):  # A file system may have no locks.
                fcntl.flock(new, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._refer_to(new)
        finally:
            os.close(new)

    def _refer_to(self, new: int) -> None:
        for descriptor in self.descriptors:
            os.dup2(new, descriptor, inheritable=descriptor in (1, 2))


def push_back(path: Path) -> None:
    """Rename a full log and its older parts by one number, in place of the oldest part.

    Raises OSError.
    """
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, FILES_KEPT)]
    for part, name in reversed([*pairwise([path, *older])]):
        if part.exists():
            part.rename(name)
