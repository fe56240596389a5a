"""Serves files of a run: an agent serves those of its host to the coordinator, and vice versa.

A request names a file, and is not trusted. The name must match exactly the form of a file that may
be transferred: never the job, the task, a key or a database, no hidden file, and no path out of the
directory. Links are not followed, and only regular files are read (reading a pipe could block this
process).
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack, suppress
from pathlib import Path

from daemons.loop import Loop
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
from dlctl.util import regular
from dlctl.wire.messages import FileData, ReadFile

_FORMS = {
    CHECKPOINTS: re.compile(r"ckpt/[0-9]{12,20}-[0-9]{1,20}/[A-Za-z0-9][A-Za-z0-9._-]{0,199}"),
    LOGS: re.compile(r"logs/(agent|server|worker)-[0-9]{1,9}\.[0-9]{1,9}\.jsonl"),
    FROZEN: re.compile(r"frozen/frozen-[0-9a-f]{32}\.safetensors"),
    ACKS: re.compile(r"acks/worker-[0-9]{1,9}\.[0-9]{1,9}"),
}
ON_HOSTS = (CHECKPOINTS, FROZEN, LOGS, ACKS)
"""What an agent serves of its host."""
AT_HOME = (CHECKPOINTS, FROZEN)
"""What the coordinator serves to the daemons of other hosts."""


class FileSender:
    def __init__(self, loop: Loop, root: Path, name: str, folders: tuple[str, ...]) -> None:
        """`root`: the run directory, or the host directory. `name`: of this daemon."""
        self.loop = loop
        self.root = root
        self.name = name
        self.folders = folders
        loop.perform(ReadBytes, lambda e: loop.post(BytesRead(e.peer, self.answer(e.question))))
        loop.perform(RemoveCopy, lambda effect: self.remove(effect.file))

    def answer(self, question: ReadFile) -> FileData:
        """The requested bytes, or the reason of a refusal. Never raises."""
        found, error = (question.part, question.offset, 0, b""), ""
        try:
            found = self._read(question)
        except FileNotFoundError:
            error = NOT_THERE
        except OSError as failure:
            error = f"cannot read it: {failure.strerror}"
        return FileData(self.name, question.request, question.file, *found, error)

    def remove(self, file: str) -> None:
        """Remove a file of a checkpoint, or that of the frozen parameters. Its directory stays:
        other daemons may be about to write there.

        A failure is ignored: the removal is retried when the next one is written.
        """
        if file.startswith((f"{CHECKPOINTS}/", f"{FROZEN}/")) and self._is_shown(file):
            with suppress(OSError), ExitStack() as stack:
                parent, name = self._directory(stack, file)
                os.unlink(name, dir_fd=parent)

    def _is_shown(self, file: str) -> bool:
        folder = file.partition("/")[0]
        return folder in self.folders and _FORMS[folder].fullmatch(file) is not None

    # ------------------------------------------------------------ reading

    def _read(self, question: ReadFile) -> tuple[int, int, int, bytes]:
        """The part, offset, size and data of an answer. Raises OSError."""
        if not self._is_shown(question.file):
            raise OSError(errno.EPERM, "this file is not for others")
        with ExitStack() as stack:
            parent, name = self._directory(stack, question.file)
            descriptor = regular.descriptor(name, os.O_NOFOLLOW, at=parent)
            stack.callback(os.close, descriptor)
            info = os.fstat(descriptor)
            part, data = info.st_ino, b""  # A log that is rotated is another file.
            offset = question.offset if question.part in (0, part) else 0
            if offset < info.st_size:
                data = os.pread(descriptor, min(question.nbytes, BYTES_MAX), offset)
            return part, offset, info.st_size, data

    def _directory(self, stack: ExitStack, file: str) -> tuple[int, str]:
        """(descriptor of the directory, name in it). Raises OSError, also if a folder is a link."""
        *folders, name = file.split("/")
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, at)
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            at = os.open(folder, flags, dir_fd=at)
            stack.callback(os.close, at)
        return at, name
