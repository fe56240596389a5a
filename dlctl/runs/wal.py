"""SQLite's write-ahead log: was its end cut off, as by any crash, or is it damaged before its end?

SQLite takes the frames of the log up to the first one whose checksum is wrong and passes over all
that follows, without a word. After a crash that is right: the rest was never committed. Behind a
flipped bit it drops transactions that were, and with them terms that were given out.

The difference is what lies behind the first wrong frame. Frames are written one after the other, so
a process that is killed leaves no whole transaction behind a wrong frame; one that failed half-way,
as on a full disk, is overwritten from its beginning and leaves no end of one. A power loss may have
kept any part of what was not synced: there only what comes behind a later sync tells. Such a sync
is a commit of page 1 alone (`RunDb.sync`).

https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct(">8I")
_HEADER_SUM_AT = 24
_MAGIC = 0x377F0682
"""Checksums of little-endian words; one more: of big-endian ones."""
_FRAME = struct.Struct(">6I")
_SUMMED = 8
"""Bytes at the beginning of a frame that its checksum is of, before those of the page."""
_WORD = 0xFFFFFFFF

Sum = tuple[int, int]


class _Frame(NamedTuple):
    at: int
    page: int
    pages: int
    """Of the whole database, in the last frame of a transaction; else 0."""
    salts: tuple[int, int]
    sum: Sum


def damaged_at(log: bytes, *, same_boot: bool) -> int | None:
    """At which byte a log is damaged; None if it is whole, or at most its end is missing.

    same_boot: no power loss can have come between the last write and now.
    """
    if len(log) < _HEADER.size:
        return None
    magic, _, page_bytes, _, *salts, s0, s1 = _HEADER.unpack_from(log)
    order = {_MAGIC: "<", _MAGIC + 1: ">"}.get(magic)
    if order is None or _add(order, log[:_HEADER_SUM_AT], (0, 0)) != (s0, s1):
        return 0 if same_boot else None
    frames = _frames(log, page_bytes)
    before = (s0, s1)
    for frame in frames:
        before = _add(order, log[frame.at : frame.at + _SUMMED], before)
        page_at = frame.at + _FRAME.size
        before = _add(order, log[page_at : page_at + page_bytes], before)
        if frame.salts != tuple(salts) or frame.sum != before:
            later = (f for f in frames if f.salts == tuple(salts))
            return frame.at if _tells(later, same_boot) else None
    return None


def _frames(log: bytes, page_bytes: int) -> Iterator[_Frame]:
    step = _FRAME.size + page_bytes
    for at in range(_HEADER.size, len(log) - step + 1, step):
        page, pages, *rest = _FRAME.unpack_from(log, at)
        yield _Frame(at, page, pages, (rest[0], rest[1]), (rest[2], rest[3]))


def _tells(later: Iterator[_Frame], same_boot: bool) -> bool:
    """Whether what is behind a wrong frame was written when that one was whole."""
    is_known_synced, is_first_of_its_transaction = same_boot, False
    for frame in later:
        if is_known_synced and frame.pages:
            return True
        if frame.pages and frame.page == 1 and is_first_of_its_transaction:
            is_known_synced = True
        is_first_of_its_transaction = bool(frame.pages)
    return False


def _add(order: str, data: bytes, to: Sum) -> Sum:
    s0, s1 = to
    for x, y in struct.iter_unpack(f"{order}II", data):
        s0 = (s0 + x + s1) & _WORD
        s1 = (s1 + y + s0) & _WORD
    return s0, s1
