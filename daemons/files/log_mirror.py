"""Writes logs and ack records of other hosts into the run directory.

The pieces are small and nothing depends on them: the loop writes them, without a sync to the disk.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from daemons import log_file
from daemons.loop import Loop
from dlctl.roles.protocol.files import LOGS, MirrorFailed, ReplaceFile, RotateLog, TakeLog
from dlctl.util import regular

log = logging.getLogger("dlctl")


class Mirrored:
    def __init__(self, loop: Loop, root: Path) -> None:
        """`root`: the run directory."""
        self.loop = loop
        self.root = root
        loop.perform(TakeLog, self._take)
        loop.perform(RotateLog, self._rotate)
        loop.perform(ReplaceFile, self._replace)

    def _take(self, effect: TakeLog) -> None:
        try:
            path = self._path(effect.file)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            if effect.offset == 0:
                flags |= os.O_TRUNC  # The existing file is an older part that was not rotated.
            with os.fdopen(regular.descriptor(path, flags, 0o644), "wb") as file:
                file.seek(effect.offset)
                file.write(effect.data)
        except OSError as error:
            self.loop.post(MirrorFailed(effect.file, effect.offset, str(error)))

    def _rotate(self, effect: RotateLog) -> None:
        try:
            log_file.push_back(self._path(effect.file))
        except OSError as error:
            log.warning("cannot rotate %s: %s", effect.file, error)

    def _replace(self, effect: ReplaceFile) -> None:
        """Replace the file atomically."""
        try:
            path = self._path(effect.file)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(effect.data)
            temporary.replace(path)
        except OSError as error:
            self.loop.post(MirrorFailed(effect.file, 0, str(error)))

    def _path(self, file: str) -> Path:
        path = self.root / file
        path.parent.mkdir(exist_ok=True)
        return path


def sizes(root: Path) -> dict[str, int]:
    """Bytes of the logs that are in a run directory, by process: "worker-0.3"."""
    found = {}
    for path in (root / LOGS).glob("*.jsonl"):
        with suppress(FileNotFoundError):  # It is being rotated.
            found[path.name.removesuffix(".jsonl")] = path.stat().st_size
    return found
