"""Takes whole files that come from another host: beside their places first, and into them when
they are known to be right. And looks whether those that were saved here are.

Bytes are written by the loop, a piece at a time; flushing and hashing takes longer, and a thread
does it, file by file; as long as it reads, it says so. A crash at any moment leaves the file whole,
or not there.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

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
from dlctl.util.hashing import Progress, sha256_of

READING_S = 1.0
"""How often the thread says that it still reads."""


class FileReceiver:
    def __init__(self, loop: Loop, root: Path) -> None:
        """`root`: what the names of files are relative to; directories in it are made."""
        self.loop = loop
        self.root = root
        self._open: dict[str, int] = {}
        """File -> descriptor of what is there of it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="incoming")
        loop.perform(TakeBytes, self._take)
        loop.perform(SealFile, self._seal)
        loop.perform(CheckFile, self._check)
        loop.perform(DiscardFile, lambda effect: self._discard(effect.file))

    def _beside(self, file: str) -> Path:
        path = self.root / file
        return path.with_name(f".{path.name}.part")

    def _take(self, effect: TakeBytes) -> None:
        try:
            write(self._descriptor(effect.file), effect.data, effect.offset)
        except OSError as error:
            self._discard(effect.file)
            words = f"cannot write {self.root / effect.file}: {error.strerror}"
            self.loop.post(FileSealed(effect.file, words))

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            path = self._beside(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # Of a process before this one.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[file] = os.open(path, flags, 0o644)
        return self._open[file]

    def _discard(self, file: str) -> None:
        descriptor = self._open.pop(file, None)
        if descriptor is not None:
            os.close(descriptor)
            with suppress(OSError):
                self._beside(file).unlink()

    def _seal(self, effect: SealFile) -> None:
        descriptor = self._open.pop(effect.file, None)
        if descriptor is None:
            return  # It could not be written, and that was said.
        self._thread.submit(self._check_and_place, effect, descriptor)

    def _check(self, effect: CheckFile) -> None:
        self._thread.submit(self._look_at, effect)

    def _look_at(self, effect: CheckFile) -> None:
        path = self.root / effect.file
        try:
            problems = checkpoints.file_problems(
                path, effect.nbytes, effect.sha256, self._progress()
            )
        except Exception as failure:
            problems = [reason_of(failure)]
        self.loop.post(FileSealed(effect.file, "; ".join(problems)))

    def _progress(self) -> Progress:
        """For a file that the thread begins with now."""
        said_at = time.monotonic()

        def reads() -> None:
            nonlocal said_at
            if time.monotonic() - said_at >= READING_S:
                said_at = time.monotonic()
                self.loop.post(StillReading())

        return reads

    def _check_and_place(self, effect: SealFile, descriptor: int) -> None:
        try:
            error = self._placed(effect, descriptor, self._progress())
        except OSError as failure:
            error = f"cannot write {self.root / effect.file}: {failure.strerror}"
        except Exception as failure:
            error = reason_of(failure)
        if error:
            with suppress(OSError):
                self._beside(effect.file).unlink()
        self.loop.post(FileSealed(effect.file, error))

    def _placed(self, effect: SealFile, descriptor: int, progress: Progress) -> str:
        """What is wrong with the file, or "" if it is in its place."""
        path = self.root / effect.file
        with os.fdopen(descriptor, "r+b") as file:
            os.fsync(file.fileno())
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != effect.nbytes:
                return f"{size_bytes} bytes have come, and {effect.nbytes} were saved there"
            found = sha256_of(file, effect.nbytes, progress) if effect.sha256 else ""
        if found != effect.sha256:
            return "what has come is not what was saved there: its SHA-256 is another one"
        self._beside(effect.file).replace(path)
        sync_directory(path.parent)
        return ""


def write(descriptor: int, data: bytes, offset: int) -> None:
    """All of `data`. Raises OSError."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
