"""What one process of a tracker leaves to the next: which run is the tracker's, and the last step
of each series that it has.
"""

from __future__ import annotations

import json
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
        self._steps: dict[str, int] = {}
        self.run: dict[str, str] = {}
        """How the tracker names this run; {} before it has one."""
        self.rows = 0
        """Rows that the tracker has."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exclusive use, and what was noted before. Raises DlctlError if another process has it."""
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
            found = json.loads(regular.read_bytes(self._path))
        except FileNotFoundError:
            return
        self.run, self._steps = dict(found["run"]), dict(found["steps"])
        self.rows = int(found["rows"])

    def name(self, **run: str) -> None:
        """Note how the tracker names this run. Raises OSError."""
        self.run |= run
        self.write(syncs=True)

    def is_new(self, row: dict[str, Any]) -> bool:
        """Whether the tracker does not have this row: steps of a series that it got from another
        process may come again. Lower ones are new: the run was rolled back to a checkpoint.
        """
        return bool(row["step"] != self._steps.get(row["series"]))

    def add(self, row: dict[str, Any]) -> None:
        self._steps[row["series"]] = row["step"]
        self.rows += 1

    def write(self, *, syncs: bool = False) -> None:
        """syncs: also outlives a power loss. Raises OSError."""
        with replacing(self._path, MODE, syncs=syncs) as file:
            known = {"run": self.run, "steps": self._steps, "rows": self.rows}
            file.write(json.dumps(known).encode())
