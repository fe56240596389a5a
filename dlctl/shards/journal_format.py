"""The bytes of a journal and of its base: records, each with its length and two CRC-32.

    head     magic, CRC of the head, CRC of the rest, number, bytes of the body, bytes of the arrays
    body     msgpack
    arrays   concatenated, as described in the body

A base is a single record with everything in it; a journal has one record per commit. Several may be
written and synced together. A crash may leave any of the pages of those that were synced last: they
were not on the disk yet, so they were never acknowledged. A damaged record before them is an error,
and is never skipped. After a crash, damage of the records of the last sync cannot be distinguished
from a write that was cut short, and is treated as one: so a log that is closed properly ends with a
redundant record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from dlctl.shards.errors import Unusable
from dlctl.util.json_depth import is_deep
from dlctl.wire.messages import Array, Json

Bytes = bytes | memoryview
MAGIC, TOGETHER = b"dlJ1", b"dlJ2"
"""A record that begins a sync; one that is synced together with the record before it."""
_HEAD = struct.Struct("<4sIIQIQ")
_HEAD_CRC_AT = 8
"""The CRC of the head covers the fields after it: the CRC of the rest, number and lengths."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    number: int
    """The number of the commit that the record contains."""
    body: Json
    data: memoryview
    """The bytes of all arrays of the record."""

    def arrays(self, shapes: Sequence[tuple[str, int]]) -> Iterator[Array]:
        """The arrays, whose dtypes and lengths the body describes. Raises Unusable."""
        at = 0
        for dtype, count in shapes:
            if type(count) is not int or count < 0:
                raise Unusable("a record has an array without a length")
            if at + np.dtype(dtype).itemsize * count > len(self.data):
                raise Unusable("a record has fewer bytes than its arrays")
            array = np.frombuffer(self.data, dtype, count, at)
            at += array.nbytes
            yield array


def pack(number: int, body: Json, arrays: Sequence[Array]) -> list[Bytes]:
    """A record as consecutive parts; the arrays are not copied."""
    packed: bytes = msgpack.packb(body)
    parts: list[Bytes] = [
        packed,
        *(np.ascontiguousarray(a).data.cast("B") for a in arrays if a.size),
    ]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_head(crc, number, len(packed), sum(map(len, parts)) - len(packed)), *parts]


def _head(crc: int, number: int, body_bytes: int, arrays_bytes: int) -> bytes:
    unsigned = _HEAD.pack(MAGIC, 0, crc, number, body_bytes, arrays_bytes)
    return _HEAD.pack(
        MAGIC, zlib.crc32(unsigned[_HEAD_CRC_AT:]), crc, number, body_bytes, arrays_bytes
    )


def joined(records: Sequence[bytes]) -> bytes:
    """The bytes of records that are synced together. A crash may leave any of their pages."""
    parts: list[Bytes] = [records[0]]
    for record in records[1:]:
        parts += [TOGETHER, memoryview(record)[len(MAGIC) :]]
    return b"".join(parts)


def read(data: Bytes, at: int = 0) -> tuple[JournalRecord, int] | None:
    """The record at an offset and the offset of its end; None if there is no complete one.

    Raises Unusable for a complete one that no dlctl of this format has written.
    """
    head = _read_head(data, at)
    if head is None:
        return None
    crc, number, body_bytes, arrays_bytes = head
    begin = at + _HEAD.size
    end = begin + body_bytes + arrays_bytes
    content = memoryview(data)[begin:end]
    if len(content) != body_bytes + arrays_bytes or zlib.crc32(content) != crc:
        return None
    body = read_body(content[:body_bytes])
    return JournalRecord(number, body, content[body_bytes:]), end


def read_body(data: Bytes) -> Json:
    """The msgpack body of a record, header or commit. Raises Unusable if it is not a map."""
    try:
        body = msgpack.unpackb(bytes(data))
    except ValueError as error:
        raise Unusable(f"it has a part that is not msgpack: {error!s:.100}") from None
    if type(body) is not dict or is_deep(body):
        raise Unusable("it has a part that is not a map, or is nested too deep")
    return body


def _read_head(data: Bytes, at: int) -> tuple[int, int, int, int] | None:
    if len(data) - at < _HEAD.size:
        return None
    magic, head_crc, *fields = _HEAD.unpack_from(data, at)
    if (
        magic not in (MAGIC, TOGETHER)
        or zlib.crc32(data[at + _HEAD_CRC_AT : at + _HEAD.size]) != head_crc
    ):
        return None
    crc, number, body_bytes, arrays_bytes = fields
    return crc, number, body_bytes, arrays_bytes


def read_each(pieces: Iterable[bytes]) -> Iterator[JournalRecord]:
    """The records of a journal, one after another: a journal may be larger than the memory. What
    follows the last is a truncated tail.

    Raises Unusable if a damaged record is followed by one of a later sync: then it was on the disk.
    """
    source, data, at, passed = iter(pieces), b"", 0, 0
    while True:
        while found := read(data, at):
            record, at = found
            yield record
        more = _take(source, _missing_bytes(data, at))
        if not more:
            break
        passed += at
        data, at = b"".join([memoryview(data)[at:], *more]), 0
    damaged_at, at = passed + at, at + 1
    while data:
        later = data.find(MAGIC, at)
        while later >= 0:
            if _read_head(data, later) is not None:
                raise Unusable(f"its journal is damaged at byte {damaged_at}")
            later = data.find(MAGIC, later + 1)
        more = _take(source, 1)  # A head may be in two pieces.
        data, at = b"".join([data[1 - _HEAD.size :], *more]) if more else b"", 0


def _missing_bytes(data: bytes, at: int) -> int:
    """How many bytes at least are missing from the incomplete record there; 0: it is damaged."""
    left = len(data) - at
    if left < _HEAD.size:
        return _HEAD.size - left
    head = _read_head(data, at)
    return max(0, _HEAD.size + head[2] + head[3] - left) if head is not None else 0


def _take(source: Iterator[bytes], count: int) -> list[bytes]:
    """The next pieces, until they have so many bytes in all."""
    taken: list[bytes] = []
    while count > 0 and (piece := next(source, b"")):
        taken.append(piece)
        count -= len(piece)
    return taken


def same(found: Any, wanted: Any, what: str) -> None:
    """Raises Unusable if a property `what` of a state is not the wanted one."""
    if found != wanted:
        raise Unusable(f"it has {what} {found!s:.100}, this server has {wanted}")
