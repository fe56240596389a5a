"""Answers questions for files of a run: on a host for the coordinator, and the other way round.

Whoever asks names a file, and may be mistaken or mean harm. A name must have exactly the form of
one of the files that are meant to travel: never the job, the task, a key or a database, nothing
hidden, and nothing that leads out of the directory. Links are not followed, and what is no regular
file (a pipe would stop this process until somebody writes) is not read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from daemons.logs import FILES_KEPT
from daemons.loop import Loop
from dlctl.errors import DlctlError
from dlctl.messages import FileData, ReadFile
from dlctl.roles.protocol.files import (
    ACKS,
    BYTES_MAX,
    CHECKPOINTS,
    FROZEN,
    LOGS,
    NOT_THERE,
    BytesRead,
    ReadBytes,
    RemoveCopy,
)

_FORMS = {
    CHECKPOINTS: re.compile(r"ckpt/[0-9]{12,20}-[0-9]{1,20}/[A-Za-z0-9][A-Za-z0-9._-]{0,199}"),
    LOGS: re.compile(r"logs/(agent|server|worker)-[0-9]{1,9}\.[0-9]{1,9}\.jsonl"),
    FROZEN: re.compile(r"frozen/frozen-[0-9a-f]{32}\.safetensors"),
    ACKS: re.compile(r"acks/worker-[0-9]{1,9}\.[0-9]{1,9}"),
}
ON_HOSTS = (CHECKPOINTS, FROZEN, LOGS, ACKS)
"""What an agent shows of its host."""
AT_HOME = (CHECKPOINTS, FROZEN)
"""What the coordinator shows to the daemons of other hosts."""


class _Part(NamedTuple):
    """A file, or a part of a log, that is open."""

    number: int
    """Of its inode: a log that is renamed keeps it."""
    descriptor: int
    size_bytes: int


class FileSender:
    def __init__(self, loop: Loop, root: Path, name: str, folders: tuple[str, ...]) -> None:
        """`root`: the run directory, or what stands for it here. `name`: of this daemon."""
        self.loop = loop
        self.root = root
        self.name = name
        self.folders = folders
        loop.perform(ReadBytes, lambda e: loop.post(BytesRead(e.peer, self.answer(e.question))))
        loop.perform(RemoveCopy, lambda effect: self.remove(effect.file))

    def answer(self, question: ReadFile) -> FileData:
        """What is asked for, or why it is not to be had. Never raises."""
        try:
            folder = self._folder(question.file)
            with self._opened(question.file, is_log=folder == LOGS) as parts:
                return self._read(question, parts)
        except DlctlError as error:
            return self._refusal(question, error.message)
        except FileNotFoundError:
            return self._refusal(question, NOT_THERE)
        except OSError as error:
            return self._refusal(question, f"cannot read it: {error.strerror}")

    def remove(self, file: str) -> None:
        """Remove a file of a checkpoint, or that of the frozen parameters; its directory stays,
        others may be about to write there.

        Nothing happens if it cannot be done: it is tried again when the next one is written.
        """
        folder = file.partition("/")[0]
        is_saved = folder in (CHECKPOINTS, FROZEN) and folder in self.folders
        if is_saved and _FORMS[folder].fullmatch(file):
            try:
                with self._directory(file) as (parent, name):
                    os.unlink(name, dir_fd=parent)
            except OSError:
                return

    def _folder(self, file: str) -> str:
        """Raises DlctlError for a name that nobody has any business with."""
        folder = file.partition("/")[0]
        if folder not in self.folders or not _FORMS[folder].fullmatch(file):
            raise DlctlError("this file is not for others")
        return folder

    # ------------------------------------------------------------ reading

    def _read(self, question: ReadFile, parts: list[_Part]) -> FileData:
        numbers = [part.number for part in parts]
        is_known = question.part in numbers
        at = numbers.index(question.part) if is_known else 0
        # A part that is gone was followed by the oldest that is there now.
        offset = question.offset if is_known or question.part == 0 else 0
        part, data = parts[at], b""
        if offset < part.size_bytes:
            data = os.pread(part.descriptor, min(question.nbytes, BYTES_MAX), offset)
        following = numbers[at + 1] if at + 1 < len(numbers) else 0
        return FileData(
            self.name, question.request, question.file, part.number, offset, part.size_bytes,
            following, data, "",
        )  # fmt: skip

    def _refusal(self, question: ReadFile, error: str) -> FileData:
        return FileData(
            self.name, question.request, question.file, question.part, question.offset, 0, 0, b"",
            error,
        )  # fmt: skip

    @contextmanager
    def _opened(self, file: str, is_log: bool) -> Iterator[list[_Part]]:
        """The file, or all parts of a log, the oldest first. Raises OSError or DlctlError."""
        with self._directory(file) as (parent, name), ExitStack() as stack:
            # Newest first: one that is renamed meanwhile is found twice, and not missed.
            names = [name, *(f"{name}.{age}" for age in range(1, FILES_KEPT))] if is_log else [name]
            found: dict[int, _Part] = {}
            for each in names:
                try:
                    descriptor = _open(each, os.O_NONBLOCK, parent)
                except FileNotFoundError:
                    continue
                stack.callback(os.close, descriptor)
                info = os.fstat(descriptor)
                if not stat.S_ISREG(info.st_mode):
                    raise DlctlError("it is no regular file")
                found.setdefault(info.st_ino, _Part(info.st_ino, descriptor, info.st_size))
            if not found:
                raise FileNotFoundError
            yield list(reversed(found.values()))

    @contextmanager
    def _directory(self, file: str) -> Iterator[tuple[int, str]]:
        """(descriptor of the directory, name in it). No component may be a link."""
        *folders, name = file.split("/")
        with ExitStack() as stack:
            at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, at)
            for folder in folders:
                at = _open(folder, os.O_DIRECTORY, at)
                stack.callback(os.close, at)
            yield at, name


def _open(name: str, flags: int, parent: int) -> int:
    return os.open(name, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
