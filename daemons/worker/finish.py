"""The task's `finish`, run once with the model of a run that has finished."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import numpy.typing as npt

from daemons.worker.failures import failure_of
from daemons.worker.replica import Replica
from daemons.worker.task import TaskError, plain

log = logging.getLogger("dlctl")
TEXT_CHARS_MAX = 8_000
"""At most 4 bytes each: they fit into a message's header."""


class _Copied(io.TextIOBase):
    """Passes on what is printed, and keeps its beginning."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.kept = ""

    def write(self, text: str) -> int:
        if len(self.kept) <= TEXT_CHARS_MAX:
            self.kept += text[:TEXT_CHARS_MAX]
        self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def run_finish(
    replica: Replica,
    parameters: npt.NDArray[np.float32],
    averaged: npt.NDArray[np.float64],
    metrics: dict[str, Any],
) -> tuple[str, str]:
    """(what it has printed, which is in the log, too, and returned; what it has raised, or "").

    What it raises is a warning in the log: nobody's training depends on it.
    """
    printed, returned, failed = _Copied(sys.stdout), "", ""
    try:
        with redirect_stdout(printed):
            returned = replica.finish(parameters, averaged, metrics)
    except TaskError as error:
        failed = failure_of(error).error
        log.warning("%s", failed, extra={"detail": error.detail})
    printed.flush()
    parts = (printed.kept.rstrip("\n"), returned)
    return plain("\n".join(filter(None, parts)), TEXT_CHARS_MAX), failed
