"""JSON lines: one object per event, written to standard error, which is the daemon's log file.

The file belongs to this process (the launcher opened it for appending), so this process also
rotates it: the file is renamed and its descriptors are pointed at a new one. Raw output of
libraries and of a crashing interpreter lands in the same file, between the JSON lines. So do the
lines of processes that it forks, as those that load data: they stay in the file of their beginning.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

FILE_BYTES_MAX = 50_000_000
FILES_KEPT = 5
LINE_CHARS_MAX = 16 * 1024
WARNINGS = "py.warnings"
"""Of `warnings.warn`: Python gives it a handler that swallows all, unless it has one."""
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """{"ts", "level", "name", "inc", "msg", ...}; keys of `extra` are added as they are."""

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
        line |= {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            line["detail"] = self.formatException(record.exc_info)[-LINE_CHARS_MAX:]
        return json.dumps(line, default=str)


class Rotating(logging.Handler):
    """Writes to descriptor 2; moves it to a new file when the present one is full.

    Not through `sys.stderr`: that has a lock which nobody renews in a process that is forked off
    while another thread writes there, and its first line would wait for ever.

    A process that was forked off never renames a file: its own descriptor still points at the full
    one after that has been renamed, and each line of it would push the newer ones back once more.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._owner = os.getpid()
        self._is_torn = False
        """There was room for the beginning of a line only."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
            self.rotate_if_full()
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        """Raises OSError if there is no room."""
        text = ("\n" if self._is_torn else "") + line + "\n"
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[os.write(2, left) :]
            self._is_torn = bool(left)

    def rotate_if_full(self) -> None:
        """Also called now and then by `Loop`: raw output fills the file as well."""
        if os.getpid() != self._owner:
            return
        self.acquire()
        try:
            if os.fstat(2).st_size >= FILE_BYTES_MAX and self.path.exists():
                self._rotate()
        except OSError:  # a full disk, say; the log goes on in the old file
            return
        finally:
            self.release()

    def _rotate(self) -> None:
        """The new file first: without it the old one has to keep its name."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        new = os.open(fresh, _APPENDING, 0o644)
        try:
            push_back(self.path)
            fresh.rename(self.path)
        except OSError:
            os.close(new)
            fresh.unlink(missing_ok=True)
            raise
        for descriptor in (1, 2):
            os.dup2(new, descriptor)
        os.close(new)


def push_back(path: Path) -> None:
    """Rename a full log to make room for a new one, and the older parts with it; the oldest goes.

    Raises OSError.
    """
    _numbered(path, FILES_KEPT - 1).unlink(missing_ok=True)
    for number in range(FILES_KEPT - 2, 0, -1):
        if _numbered(path, number).exists():
            _numbered(path, number).rename(_numbered(path, number + 1))
    path.rename(_numbered(path, 1))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


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
    """The root logger is left to the task: with a handler of ours there, `logging.basicConfig`
    would do nothing, and with `force=True` it would take our log away. What the task's handlers
    write to sys.stderr is logged as printed; what has no handler is logged as a record.
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
    """What user code prints, as log lines of this daemon: {"stream": "stdout", "msg": ...}.

    Each thread has a line of its own, so that those of two threads are not mixed up.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._here = threading.local()
        self._begin()
        # Another thread may be writing when a process is forked off, which has only this one.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, str] = {}
        """Thread -> the beginning of a line that it has not ended yet."""

    def write(self, text: str) -> int:
        if getattr(self._here, "busy", False):
            return len(text)  # A logging error that is being printed while we log.
        thread = threading.get_ident()
        with self._lock:
            *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
            if rest:
                self._begun[thread] = rest[-LINE_CHARS_MAX:]
        # Not under the lock: a thread that holds the log's lock may be about to write here.
        self._log(lines)
        return len(text)

    def end_lines(self) -> None:
        """Log what has no newline behind it. `flush` must not: progress bars flush all the time."""
        with self._lock:
            lines = list(self._begun.values())
            self._begun.clear()
        self._log(lines)

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
    """Log the last printed lines that have no newline at their end; before this process exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Printed):
            stream.end_lines()
