"""How the workers of a host find the memory of their one model.

The memory is anonymous (memfd): it exists as long as a process has it open. So a killed worker
destroys nothing, and nothing is left behind when all have exited. A small file beside the run lists
the pid and descriptor of each worker that has the memory open; other workers open it through /proc.
The file is read and written under a lock, so that only one of several starting workers creates the
memory. The memory must contain the same secret as the file, because a pid may be reused.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from daemons.worker.hogwild.memory import ModelMemory, check_device, reserve, size_of
from daemons.worker.replica import TorchReplica
from dlctl.errors import DlctlError, os_errors_as
from dlctl.util import regular
from dlctl.wire.messages import Array

FILE = "shared-model"
"""The file in the run's directory, or that of its host."""
MEMORY = "dlctl-model"
KEY_BYTES = 16
"""The size of the secret at the begin of the memory."""


class Shared(NamedTuple):
    mark: Array
    """uint8[1], `ModelBuilt.mark`."""
    is_new: bool
    """This call has created the memory."""
    descriptor: int
    """The file descriptor of the memory; it stays open for other workers."""


def share(replica: TorchReplica, directory: Path) -> Shared:
    """Move the model into the memory that the workers of this host share. It takes the values
    there; the first worker puts in its own. directory: the same for all workers.

    Raises DlctlError if the model differs from theirs, or is on a GPU.
    """
    check_device(replica)
    size = replica.layout.size()
    path = directory / FILE
    with os_errors_as("cannot share the model", path):
        fd = regular.descriptor(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        inode = os.fstat(fd).st_ino
        key, rows = _read(file.read(), inode)
        memory = _open_any(key, rows, size)
        is_new = memory < 0
        if is_new:
            key, rows = secrets.token_bytes(KEY_BYTES), []
            memory = _make(key, size)
        model = ModelMemory(memory, replica)
        if is_new:
            model.fill(replica)
        model.take(replica)
        rows = [row for row in rows if os.path.exists(f"/proc/{row[0]}/fd/{row[1]}")]
        _replace(fd, json.dumps([inode, key.hex(), [*rows, (os.getpid(), memory)]]))
    return Shared(model.mark, is_new, memory)


def _replace(file: int, text: str) -> None:
    """Write the new content over the old one at once: a writer that is killed may not leave a file
    that lists nobody, as the next worker would make a second memory beside that of the others. A
    longer old content is overwritten by spaces.
    """
    content = text.encode()
    os.pwrite(file, content.ljust(os.fstat(file).st_size), 0)
    os.ftruncate(file, len(content))


def _read(text: str, inode: int) -> tuple[bytes, list[Any]]:
    """The secret, and (pid, descriptor) of each worker that has had the memory open: none if the
    file is a copy, as in a copied run.
    """
    try:
        of, key, rows = json.loads(text)
        known = [(int(pid), int(fd)) for pid, fd in rows] if of == inode else []
        return bytes.fromhex(key), known
    except (ValueError, TypeError):
        return b"", []  # It is new, or another program has written it.


def _open_any(key: bytes, rows: list[Any], size: int) -> int:
    """The memory, opened from the first process that has it; -1: none has. size: of this model.
    Raises DlctlError if theirs has another one.
    """
    for pid, fd in rows:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{MEMORY}"):
                continue
            memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # The process has exited, or the pid belongs to another user's process.
            continue
        if os.pread(memory, KEY_BYTES, 0) != key:
            os.close(memory)
            continue
        if (theirs := size_of(memory)) != size:
            os.close(memory)
            raise DlctlError(
                f"the other workers' model has {theirs} trained values, this one {size}",
                hint="the task's code has to build the same model everywhere",
            )
        return memory
    return -1


def _make(key: bytes, size: int) -> int:
    memory = os.memfd_create(MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve(memory, size)
    except DlctlError:
        os.close(memory)
        raise
    os.pwrite(memory, key, 0)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory
