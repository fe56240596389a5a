"""Logging of a daemon: JSON lines in its log file.

The launcher opens the file for appending as descriptors 1 and 2, so raw output of libraries and of
a crashing interpreter goes there too, between the JSON lines. In a worker that holds until the file
gets a descriptor of its own (`daemons.worker.task.print_streams`). Forked processes, such as data
loaders, log to the file that was current at the fork.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from daemons.log_file import LINE_CHARS_MAX, DaemonLogFile, json_line

WARNINGS = "py.warnings"
"""Logger of `warnings.warn`: without a handler, Python adds one that discards everything."""
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Lines as `json_line` makes them, with the keys of `extra`."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__()
        self.daemon = name
        self.incarnation = incarnation

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            fields["detail"] = self.formatException(record.exc_info)[-LINE_CHARS_MAX:]
        level, text = record.levelname.lower(), record.getMessage()
        return json_line(record.created, level, self.daemon, self.incarnation, text, fields)


class Rotating(logging.Handler):
    """Writes to the log file, and has it rotated when it is full.

    It does not use `sys.stderr`: if another thread holds its lock during a fork, the lock stays
    held in the child, whose first line would deadlock.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = DaemonLogFile(path, 2, 1)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.write(self.format(record) + "\n")
            self.rotate_if_full()
        except Exception:
            self.handleError(record)

    def rotate_if_full(self) -> None:
        """Rotate the log file if it is full. `Loop` calls it, too: raw output fills the file."""
        assert self.lock is not None
        with suppress(OSError), self.lock:  # On a full disk, logging continues in the old file.
            self.file.rotate_if_full()


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
