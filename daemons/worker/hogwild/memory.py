"""The model in memory that all processes map: its values, and the newest gradient of each process
that computes for another one.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

from daemons.worker.replica import TorchReplica
from daemons.worker.shared_vectors import SharedVectors, nbytes
from dlctl.errors import DlctlError
from dlctl.util.units import short_size
from dlctl.wire.messages import Array

HEADER_BYTES = mmap.PAGESIZE
MARK_AT = 64
"""The mark has a cache line of its own."""


class ModelMemory:
    def __init__(self, file: int, replica: TorchReplica, ranks: int = 1) -> None:
        """file: a descriptor of reserved memory. ranks: processes of the replica. Raises DlctlError
        if the model is on a GPU.
        """
        check_device(replica)
        self._vectors = SharedVectors(file, replica.layout.size(), ranks, header_bytes=HEADER_BYTES)
        self._values = self._vectors.vector(0)
        self.mark: Array = np.frombuffer(self._vectors.mapped, np.uint8, 1, MARK_AT)
        """uint8[1], `ModelBuilt.mark`."""

    def fill(self, replica: TorchReplica) -> None:
        """Put the values of a replica's model in; the first process does it."""
        self._values.copy_(torch.from_numpy(replica.parameters))

    def take(self, replica: TorchReplica) -> None:
        """Move the model of a replica here. It takes the values that are there."""
        replica.share(self._values)

    def gradient(self, rank: int) -> Array:
        """float32[d], the newest one of a later rank."""
        return self._vectors.array(rank, 0, self._vectors.size)


def check_device(replica: TorchReplica) -> None:
    """Raises DlctlError if the model is on a GPU."""
    if replica.device.type != "cpu":
        raise DlctlError(
            f"several processes share host memory, and the model is on {replica.device}",
            hint='set workers.device = "cpu"',
        )


def size_of(file: int) -> int:
    """The trained values of the model in a memory of one rank."""
    return (os.fstat(file).st_size - HEADER_BYTES) // 4


def reserve(file: int, size: int, ranks: int = 1) -> None:
    """Allocate a model's memory now: a later write would kill the process (SIGBUS) if memory had
    run out. Raises DlctlError.
    """
    wanted = nbytes(size, ranks, header_bytes=HEADER_BYTES)
    try:
        os.posix_fallocate(file, 0, wanted)
    except OSError as error:
        raise DlctlError(
            f"no {short_size(wanted)} of memory for the model: {error.strerror}",
            hint="`free -h` says what this host has; a container has a limit of its own. A replica "
            "of fewer processes, or a smaller model, needs less",
        ) from error
