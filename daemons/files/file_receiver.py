"""Receives files from another host: into temporary files, which are renamed after verification.
Also verifies files that were saved on this machine.

The loop writes the bytes, a piece at a time. A thread does the slow flushing and hashing, one file
at a time, and reports that it is still reading. After a crash at any moment the file is complete or
missing.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from daemons.loop import Loop
from daemons.process import reason_of
from dlctl.roles.protocol.files import (
    CheckFile,
    DiscardFile,
    FileSealed,
    SealFile,
    StillReading,
    TakeBytes,
)
from dlctl.runs import checkpoints
from dlctl.util.fsync import sync_directory

READING_S = 1.0
"""Interval of the thread's reports that it is still reading."""


class FileReceiver:
    def __init__(self, loop: Loop, root: Path) -> None:
        """`root`: file names are relative to it; its subdirectories are created."""
        self.loop = loop
        self.root = root
        self._open: dict[str, IO[bytes]] = {}
        """File name -> its partial content."""
        self._reported_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="incoming")
        loop.perform(TakeBytes, self._take)
        loop.perform(SealFile, self._seal)
        loop.perform(CheckFile, lambda effect: self._thread.submit(self._verify, effect))
        loop.perform(DiscardFile, lambda effect: self._discard(effect.file))

    def _beside(self, file: str) -> Path:
        path = self.root / file
        return path.with_name(f".{path.name}.part")

    def _take(self, effect: TakeBytes) -> None:
        try:
            file = self._received(effect.file)
            file.seek(effect.offset)
            file.write(effect.data)
        except OSError as error:
            self._discard(effect.file)
            words = f"cannot write {self.root / effect.file}: {error.strerror}"
            self.loop.post(FileSealed(effect.file, words))

    def _received(self, file: str) -> IO[bytes]:
        if file not in self._open:
            path = self._beside(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # Left by an earlier process.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._open[file] = os.fdopen(os.open(path, flags, 0o644), "wb")
        return self._open[file]

    def _discard(self, file: str) -> None:
        received = self._open.pop(file, None)
        if received is not None:
            with suppress(OSError), received:
                self._beside(file).unlink()

    def _seal(self, effect: SealFile) -> None:
        received = self._open.pop(effect.file, None)
        if received is not None:  # Else it could not be written, and that was reported.
            self._thread.submit(self._verify, effect, received)

    def _verify(self, effect: SealFile | CheckFile, received: IO[bytes] | None = None) -> None:
        """Post the problem of a file, or "". A good one that was received is renamed into place."""
        path = self.root / effect.file
        read = path if received is None else self._beside(effect.file)
        self._reported_at = time.monotonic()
        try:
            if received is not None:
                with received:
                    received.flush()
                    os.fsync(received.fileno())
            # One that was received may have none: it verifies itself by its content.
            sha256 = effect.sha256 if read == path else effect.sha256 or None
            problems = checkpoints.file_problems(read, effect.nbytes, sha256, self._on_progress)
            error = "; ".join(problems)
            if read != path and not error:
                read.replace(path)
                sync_directory(path.parent)
        except OSError as failure:
            error = f"cannot write {path}: {failure.strerror}"
        except Exception as failure:
            error = reason_of(failure)
        if read != path and error:
            with suppress(OSError):
                read.unlink()
        self.loop.post(FileSealed(effect.file, error))

    def _on_progress(self) -> None:
        """Report that more bytes have been read."""
        if time.monotonic() - self._reported_at >= READING_S:
            self._reported_at = time.monotonic()
            self.loop.post(StillReading())
