"""JSON lines: one object per event, written to standard error, which is the daemon's log file.

The file belongs to this process (the launcher opened it for appending), so this process also
rotates it: it renames the file and points its descriptors at a new one. Raw output of libraries and
of a crashing interpreter goes to the same file, between the JSON lines. So do lines of forked
processes, such as data loaders: they keep writing to the file that was current at the fork.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from dlctl.util import regular

FILE_BYTES_MAX = 50_000_000
FILES_KEPT = 5
LINE_CHARS_MAX = 16 * 1024
WARNINGS = "py.warnings"
"""Logger of `warnings.warn`: without a handler, Python adds one that discards everything."""
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """{"ts", "level", "name", "inc", "msg", ...} and the keys of `extra`. A task's own "ts", or any
    other key of ours, becomes "extra.ts".
    """

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__()
        self.daemon = name
        self.incarnation = incarnation

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "name": self.daemon,
            "inc": self.incarnation,
            "msg": record.getMessage()[:LINE_CHARS_MAX],
        }
        extra = {key: value for key, value in vars(record).items() if key not in _PLAIN}
        ours = {*line, "schema"}  # The latter is that of `logs --json`.
        line |= {f"extra.{key}" if key in ours else key: value for key, value in extra.items()}
        if record.exc_info:
            line["detail"] = self.formatException(record.exc_info)[-LINE_CHARS_MAX:]
        return json.dumps(line, default=str)


class Rotating(logging.Handler):
    """Writes to descriptor 2; moves it to a new file when the current one is full.

    It does not use `sys.stderr`: if another thread holds its lock during a fork, the lock stays
    held in the child, whose first line would deadlock.

    A forked process never rotates: its descriptor still points at the full file after a rotation,
    so each of its lines would rotate again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._owner = os.getpid()
        self._is_torn = False
        """The last line was written only in part, because the disk was full."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
            self.rotate_if_full()
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        """Raises OSError if the disk is full."""
        text = ("\n" if self._is_torn else "") + line + "\n"
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[os.write(2, left) :]
            self._is_torn = bool(left)

    def rotate_if_full(self) -> None:
        """Also called regularly by `Loop`: raw output fills the file as well."""
        if os.getpid() != self._owner:
            return
        assert self.lock is not None
        with suppress(OSError), self.lock:  # On a full disk, logging continues in the old file.
            if os.fstat(2).st_size >= FILE_BYTES_MAX and self.path.exists():
                self._rotate()

    def _rotate(self) -> None:
        """Create the new file first: if that fails, the old one must keep its name."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        new = regular.descriptor(fresh, _APPENDING, 0o644)
        try:
            push_back(self.path)
            fresh.rename(self.path)
            for descriptor in (1, 2):
                os.dup2(new, descriptor)
        finally:
            os.close(new)
            fresh.unlink(missing_ok=True)


def push_back(path: Path) -> None:
    """Rename a full log and its older parts by one number, in place of the oldest part.

    Raises OSError.
    """
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, FILES_KEPT)]
    for part, name in reversed([*pairwise([path, *older])]):
        if part.exists():
            part.rename(name)


class _Own(logging.Logger):
    """A logger that the task's `logging.disable` and `dictConfig` do not silence."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, _: bool) -> None: ...

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (the name is of logging)
        return level >= self.getEffectiveLevel()


def set_up(name: str, incarnation: int, path: Path) -> Rotating:
    """Set up logging of this process. The root logger is left to the task: with a handler of dlctl
    there, `logging.basicConfig` would do nothing, or remove it with `force=True`. Output of the
    task's handlers to sys.stderr is logged as printed lines; records without a handler are logged
    as records.
    """
    handler = Rotating(path)
    handler.setFormatter(JsonLines(name, incarnation))
    logging.lastResort = handler
    logging.captureWarnings(True)
    levels = {"dlctl": logging.INFO, "daemons": logging.WARNING, WARNINGS: logging.WARNING}
    for own, level in levels.items():
        logger = logging.getLogger(own)
        logger.__class__ = _Own
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return handler


class _Printed(io.TextIOBase):
    """Logs what user code prints, as lines of this daemon: {"stream": "stdout", "msg": ...}.

    Each thread has its own line buffer, so that lines of two threads are not mixed.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._here = threading.local()
        self._begun: dict[int, str] = {}
        """Thread -> the beginning of its unfinished line. Without a lock, which a signal handler or
        a forked process might wait for in vain: each thread only touches its own line.
        """
        os.register_at_fork(after_in_child=self._begun.clear)

    def write(self, text: str) -> int:
        if getattr(self._here, "busy", False):
            return len(text)  # Logging itself prints an error.
        thread = threading.get_ident()
        *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
        if rest:
            self._begun[thread] = rest[-LINE_CHARS_MAX:]
        self._log(lines)
        return len(text)

    def end_lines(self) -> None:
        """Log unfinished lines. `flush` must not do that: progress bars flush all the time."""
        lines = [self._begun.pop(thread, "") for thread in [*self._begun]]
        self._log([line for line in lines if line])

    def _log(self, lines: list[str]) -> None:
        self._here.busy = True
        try:
            for line in lines:
                logging.getLogger("dlctl").info("%s", line, extra={"stream": self._stream})
        finally:
            self._here.busy = False

    def writable(self) -> bool:
        return True


def capture_prints() -> None:
    """From now on `print` and writes to sys.stderr become log lines."""
    sys.stdout = _Printed("stdout")
    sys.stderr = _Printed("stderr")


def end_prints() -> None:
    """Log printed lines without a newline at the end, before this process exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Printed):
            stream.end_lines()
