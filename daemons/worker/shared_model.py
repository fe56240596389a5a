"""One model in the memory of a host, for all workers there: whose it is, and how one gets at it.

The memory has no name (memfd): it lives as long as anybody has it open, so whoever is killed takes
nothing along, and nothing is left behind when all are gone. A small file beside the run says who
has it open, and under which number: others open it through /proc. It is read and written under a
lock, so that of several workers that begin one makes the memory. What is opened has to know the
same secret as the file: the number of a process may be used again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from daemons.worker.replica import Replica
from dlctl.errors import DlctlError
from dlctl.messages import Array
from dlctl.util.units import short_size

FILE = "shared-model"
"""In the run's directory, or that of its host."""
MEMORY = "dlctl-model"
HEADER_BYTES = mmap.PAGESIZE
KEY_BYTES = 16
MARK_AT = 64
"""The mark has a cache line of its own."""


class Shared(NamedTuple):
    mark: Array
    """uint8[1], `ModelBuilt.mark`."""
    is_new: bool
    """The memory was made just now."""
    descriptor: int
    """Of the memory, which stays open for others."""


def share(replica: Replica, directory: Path) -> Shared:
    """Have the model lie where that of this host's other workers does: with the values that are
    there, or if nobody has any, with its own. directory: the same for all of them.

    Raises DlctlError if the model is another one than theirs, or lies on a GPU.
    """
    if replica.device.type != "cpu":
        raise DlctlError(
            f"workers share the memory of their host, and the model is on {replica.device}",
            hint='set workers.device = "cpu"',
        )
    size = HEADER_BYTES + 4 * replica.layout.size()
    fd = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        inode = os.fstat(fd).st_ino
        key, rows = _read(file.read(), inode)
        memory = _open_any(key, rows, size)
        is_new = memory < 0
        if is_new:
            key, rows = secrets.token_bytes(KEY_BYTES), []
            memory = _make(key, size)
        mapped = mmap.mmap(memory, size)
        values = torch.from_numpy(np.frombuffer(mapped, np.float32, offset=HEADER_BYTES))
        if is_new:
            values.copy_(torch.from_numpy(replica.parameters))
        replica.move_to(values, is_shared=True)
        rows = [row for row in rows if os.path.exists(f"/proc/{row[0]}/fd/{row[1]}")]
        file.seek(0)
        file.truncate()
        file.write(json.dumps([inode, key.hex(), [*rows, (os.getpid(), memory)]]))
    return Shared(np.frombuffer(mapped, np.uint8, 1, MARK_AT), is_new, memory)


def _read(text: str, inode: int) -> tuple[bytes, list[Any]]:
    """The secret, and (process, number of its open file) of those that have had the memory open. A
    copy of the file, as of a whole run, tells of nobody.
    """
    try:
        of, key, rows = json.loads(text)
        known = [(int(pid), int(fd)) for pid, fd in rows] if of == inode else []
        return bytes.fromhex(key), known
    except (ValueError, TypeError):
        return b"", []  # Nobody has written it, or not to its end: who did is dead.


def _open_any(key: bytes, rows: list[Any], size: int) -> int:
    """The memory, from the first that has it; -1: nobody has. Raises DlctlError."""
    for pid, fd in rows:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{MEMORY}"):
                continue
            memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # Ended, or by now a process of somebody else's.
            continue
        if os.pread(memory, KEY_BYTES, 0) != key:
            os.close(memory)
            continue
        if (theirs := os.fstat(memory).st_size) != size:
            os.close(memory)
            raise DlctlError(
                f"the other workers' model has {(theirs - HEADER_BYTES) // 4} trained values, this "
                f"one {(size - HEADER_BYTES) // 4}",
                hint="the task's code has to build the same model everywhere",
            )
        return memory
    return -1


def reserve(memory: int, size: int) -> None:
    """Have a file in memory take so many bytes now: where there are none left, a write into it
    would end the process. Raises DlctlError.
    """
    try:
        os.posix_fallocate(memory, 0, size)
    except OSError as error:
        raise DlctlError(
            f"no {short_size(size)} of memory for the model: {error.strerror}",
            hint="`free -h` says what this host has; a container has a limit of its own. A replica "
            "of fewer processes, or a smaller model, needs less",
        ) from error


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
