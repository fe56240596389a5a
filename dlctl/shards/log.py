"""The log of a shard on a disk, and the writes that make its commits durable.

A `LogWrite` has bytes of its own: the arrays that it was made of may change before it is performed.
Writes are performed in the order in which they were made, several together: one sync covers all of
their records in a log. Of records in several logs a crash may leave any. Where a commit of one
table depends on an earlier one of another table, it is performed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from dlctl.shards.errors import NoRoom
from dlctl.shards.journal_format import Bytes, joined

Point = Callable[[str], None]
"""Called with a name at every step at which tests and failpoints may kill the process."""


class ShardLog(Protocol):
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

    def read_journal(self, number: int) -> Iterable[bytes]:
        """In pieces; none if it does not exist."""
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
class LogWrite:
    """What makes one commit durable: a record in the journal, a new base, or both."""

    log: ShardLog
    number: int
    """The number of the commit."""
    record: bytes = field(repr=False)
    """The record in the journal; b"": the base alone has the commit."""
    base: bytes = field(repr=False)
    """b"": none. Behind a record it only starts the journal over: if the disk has no room for it,
    the journal goes on."""
    point: Point
    in_order: bool = False
    """Whether all writes before it must be durable before any of it is written, and all of it
    before any that follows."""

    def perform(self) -> None:
        """Write and sync the commit. Raises DlctlError if the disk fails."""
        perform_first([self])


def perform_first(writes: Sequence[LogWrite]) -> int:
    """Perform the first writes together; returns how many are durable now.

    Raises DlctlError if the disk fails: no later write may be performed.
    """
    count = together(writes)
    first, last = writes[0], writes[count - 1]
    if not first.record:
        first.log.begin(first.number, [first.base])
        first.point("base written")
        first.point("commit written")
        return 1
    for log, records in by_log(writes[:count]):
        # One write: behind each the thread waits for the interpreter. One record is not copied.
        log.append([joined(records)])
        first.point("record written")
    if last.base:
        with suppress(NoRoom):
            last.log.begin(last.number, [last.base])
            last.point("base written")
    first.point("commit written")
    return count


def together(writes: Sequence[LogWrite]) -> int:
    """How many of the first writes may be performed together: up to a base, and none in order."""
    first, count = writes[0], 1
    if first.in_order or not first.record:
        return count
    while count < len(writes) and not writes[count - 1].base:
        if writes[count].in_order or not writes[count].record:
            break
        count += 1
    return count


def by_log(writes: Sequence[LogWrite]) -> list[tuple[ShardLog, list[bytes]]]:
    """The records of each log."""
    logs: dict[int, tuple[ShardLog, list[bytes]]] = {}
    for write in writes:
        logs.setdefault(id(write.log), (write.log, []))[1].append(write.record)
    return list(logs.values())
