"""What one process of a tracker leaves to the next: which run is the tracker's, and the last step
of each series that it has.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs import paths
from dlctl.util import regular
from dlctl.util.flock import is_locked_within
from dlctl.util.fsync import replacing

FOLDER = "trackers"
"""In the run directory."""
PREDECESSOR_S = 30.0
"""Time for the process before to end: that of a coordinator that was killed still delivers."""
MODE = 0o600


class TrackerNotes:
    def __init__(self, directory: Path, tracker: str) -> None:
        """directory: that of the run. Raises OSError."""
        self._path = directory / FOLDER / f"{tracker}.json"
        self._path.parent.mkdir(mode=paths.PRIVATE, exist_ok=True)
        self._last: dict[str, tuple[float, int]] = {}
        """Series -> time and step of its last row that the tracker has."""
        self.run: dict[str, str] = {}
        """How the tracker names this run; {} before it has one."""
        self.rows = 0
        """Rows that the tracker has."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exclusive use, and what was noted before. Raises DlctlError if another process has it, or
        it is damaged.
        """
        lock = regular.descriptor(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, MODE)
        try:
            if not is_locked_within(PREDECESSOR_S, lock):
                raise DlctlError("the process before it does not end", where=str(self._path))
            self._read()
            yield
        finally:
            os.close(lock)

    def _read(self) -> None:
        try:
            found = noted(self._path)
            self.run, self.rows, self._last = found["run"], found["rows"], found["last"]
        except ValueError as error:
            raise DlctlError(f"{self._path} is damaged: move it away for a new run") from error

    def name(self, **run: str) -> None:
        """Note how the tracker names this run, so that it outlives a power loss. Raises OSError."""
        self.run |= run
        self.write(self.known(), syncs=True)

    def is_new(self, row: dict[str, Any]) -> bool:
        """Whether the tracker does not have this row. A step in a row that repeats is not new; a
        lower one is: the run was rolled back to a checkpoint. Rows from the run's database, which a
        coordinator may never have sent, are compared by their times.
        """
        at, step = self._last.get(row["series"], (-math.inf, None))
        return bool(row["step"] != step and not (row.get("is_recalled") and row["at"] <= at))

    def add(self, row: dict[str, Any]) -> None:
        self._last[row["series"]] = row["at"], row["step"]
        self.rows += 1

    def known(self) -> dict[str, Any]:
        """All of it, as it is written."""
        return {"run": dict(self.run), "last": dict(self._last), "rows": self.rows}

    def write(self, known: dict[str, Any], *, syncs: bool = False) -> None:
        """Raises OSError."""
        with replacing(self._path, MODE, syncs=syncs) as file:
            file.write(json.dumps(known).encode())


def noted(path: Path) -> dict[str, Any]:
    """What a file of notes has. Raises OSError, and ValueError if it is damaged."""
    try:
        found = json.loads(regular.read_bytes(path))
    except FileNotFoundError:
        return {"run": {}, "last": {}, "rows": 0}
    try:
        last = {str(name): (float(at), int(step)) for name, (at, step) in found["last"].items()}
        return {"run": dict(found["run"]), "last": last, "rows": int(found["rows"])}
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError("these are no notes of a tracker") from error
