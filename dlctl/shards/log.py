"""The log of a shard on a disk, and the writes that make its commits durable.

A `Write` has bytes of its own: the arrays that it was made of may change before it is performed.
Writes are performed in the order in which they were made. One sync covers consecutive records of a
log; the writes of two logs are never reordered, since a commit of one table may depend on an
earlier one of another table (`dlctl/roles/server/vectors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from dlctl.shards.base import NoRoom, Point
from dlctl.shards.records import Bytes


class Log(Protocol):
    """The files of one shard: bases, each with a journal. When a method returns, its data is on the
    disk.

    Every method raises DlctlError, naming the file, if the disk fails. The content of the disk is
    then unknown: `append` refuses all records, and only a new base may follow, or the end of the
    server.
    """

    where: str
    """The place, for messages."""

    def bases(self) -> list[int]:
        """The numbers of all bases, newest first."""
        ...

    def read_base(self, number: int) -> bytes: ...

    def read_journal(self, number: int) -> bytes:
        """b"" if it does not exist."""
        ...

    def begin(self, number: int, parts: Sequence[Bytes]) -> None:
        """Write a base and begin its journal; remove all others when both are on the disk. Raises
        NoRoom if the disk is full: either the log is unchanged, and records may follow, or the base
        may already exist, and `append` refuses all records."""
        ...

    def append(self, parts: Sequence[Bytes]) -> None:
        """Write records to the end of the journal that was begun."""
        ...


@dataclass(frozen=True, slots=True)
class Write:
    """What makes one commit durable: a record in the journal, a new base, or both."""

    log: Log
    number: int
    """Of the commit."""
    record: bytes = field(repr=False)
    """b"": the base alone has the commit."""
    base: bytes = field(repr=False)
    """b"": none. Behind a record it only starts the journal over: if the disk has no room for it,
    the journal goes on."""
    point: Point

    @property
    def nbytes(self) -> int:
        return len(self.record) + len(self.base)

    def perform(self) -> None:
        """Raises DlctlError if the disk fails."""
        perform_first([self])


def perform_first(writes: Sequence[Write]) -> int:
    """Perform the first writes, as many as one sync covers; returns how many are durable now.

    Raises DlctlError if the disk fails: no later write may be performed.
    """
    first = writes[0]
    if not first.record:
        first.log.begin(first.number, [first.base])
        first.point("base written")
        first.point("commit written")
        return 1
    count = 1
    while count < len(writes) and _joins(writes[count], writes[count - 1]):
        count += 1
    first.log.append([write.record for write in writes[:count]])
    first.point("record written")
    last = writes[count - 1]
    if last.base:
        with suppress(NoRoom):
            last.log.begin(last.number, [last.base])
            last.point("base written")
    first.point("commit written")
    return count


def _joins(write: Write, before: Write) -> bool:
    """Whether its record is covered by the sync of the one before it."""
    return write.log is before.log and bool(write.record) and not before.base
