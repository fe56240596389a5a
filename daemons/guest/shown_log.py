"""Shows the log of a worker on the terminal while it grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dlctl.runs import paths
from dlctl.util import regular

READ_BYTES = 1 << 20


class ShownLog:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path: Path | None = None
        self._offset = 0
        self._rest = b""

    def follow(self, name: str, incarnation: int) -> None:
        """Show this process from now on; what the one before has left is shown first."""
        self.look()
        self._path = paths.log_path(self.directory, name, incarnation)
        self._offset, self._rest = 0, b""

    def look(self) -> None:
        if self._path is None:
            return
        try:
            with regular.opened(self._path) as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0  # It was rotated.
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if text := _readable(line):
                print(text, flush=True, file=sys.stdout)


def _readable(line: bytes) -> str:
    text = line.decode(errors="replace")
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(row, dict):
        return text
    said = str(row.get("msg", ""))
    return f"{said}\n{row['detail']}" if row.get("detail") else said
