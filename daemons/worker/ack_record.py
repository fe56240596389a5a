"""Records the pushes that the servers have settled, in a file that outlives the worker.

It takes one store into mapped memory per ack, about a microsecond in all. The kernel keeps the page
when the process is killed; `dlctl/runs/acks.py` defines the format and reads it.
"""

from __future__ import annotations

import logging
import mmap
import sys
from pathlib import Path

from dlctl.roles.protocol.effects import Settled
from dlctl.runs import acks

log = logging.getLogger("dlctl")


class Acks:
    """The record of one incarnation, created when its first push is settled.

    Training does not depend on it: if it cannot be written, one warning is logged.
    """

    def __init__(self, directory: Path, name: str, incarnation: int, shards: int) -> None:
        self.path = acks.path_of(directory, name, incarnation)
        self.shards = shards
        self._counts: list[int] | memoryview | None = None

    def write(self, effect: Settled) -> None:
        if self._counts is None:
            self._counts = self._opened(effect.term)
        self._counts[effect.shard] = effect.count

    def _opened(self, term: int) -> list[int] | memoryview:
        try:
            return _mapped(self.path, acks.blank(term, self.shards))
        except OSError as error:
            log.warning("cannot record what the servers settle (%s): %s", self.path, error.strerror)
            return [0] * self.shards  # Nobody reads them.


def _mapped(path: Path, content: bytes) -> memoryview:
    """The counts of a new file. It is created atomically, with its disk space allocated: a write to
    a mapped page without disk space would kill the worker with SIGBUS."""
    assert sys.byteorder == "little", "the counts are stored as the machine stores them"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # Left by an earlier attempt.
        with temporary.open("x+b") as file:
            file.write(content)
            file.flush()
            mapped = mmap.mmap(file.fileno(), len(content))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return memoryview(mapped)[acks.HEADER.size :].cast("Q")
