"""SQLite's write-ahead log: was it truncated, as by any crash, or damaged before its end?

SQLite uses the frames of the log up to the first one with a wrong checksum and silently ignores all
that follow. After a crash that is right: the rest was never committed. After a flipped bit it drops
committed transactions, and with them terms that were issued.

The difference is in the frames after the first wrong one. Frames are written in sequence, so a
killed process leaves no complete transaction after a wrong frame; a failed transaction, as on a
full disk, is overwritten from its beginning and leaves no end of one. A power loss may preserve any
part of what was not synced: then only frames after a later sync prove damage. Such a sync is a
commit of page 1 alone (`RunDb.sync`).

https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct(">8I")
_HEADER_SUM_AT = 24
_MAGIC = 0x377F0682
"""For checksums of little-endian words; this plus one: big-endian."""
_FRAME = struct.Struct(">6I")
_SUMMED = 8
"""Leading bytes of a frame that its checksum covers, before those of the page."""
_WORD = 0xFFFFFFFF

Sum = tuple[int, int]


class _Frame(NamedTuple):
    at: int
    page: int
    pages: int
    """Size of the database, in the last frame of a transaction; else 0."""
    salts: tuple[int, int]
    sum: Sum


def damaged_at(log: bytes, *, same_boot: bool) -> int | None:
    """The byte offset of damage in a log; None if it is intact, or only truncated.

    same_boot: there was no power loss between the last write and now.
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
            return frame.at if _proves_damage(later, same_boot) else None
    return None


def _frames(log: bytes, page_bytes: int) -> Iterator[_Frame]:
    step = _FRAME.size + page_bytes
    for at in range(_HEADER.size, len(log) - step + 1, step):
        page, pages, *rest = _FRAME.unpack_from(log, at)
        yield _Frame(at, page, pages, (rest[0], rest[1]), (rest[2], rest[3]))


def _proves_damage(later: Iterator[_Frame], same_boot: bool) -> bool:
    """Whether the frames after a wrong one prove that it was written correctly once."""
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
