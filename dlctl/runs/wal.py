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

_HEADER = struct.Struct(">8I")
_HEADER_SUM_AT = 24
_MAGIC = 0x377F0682
"""For checksums of little-endian words; this plus one: big-endian."""
_FRAME = struct.Struct(">6I")
"""Page, size of the database in pages (in the last frame of a transaction; else 0), salts, sum."""
_SUMMED = 8
"""Leading bytes of a frame that its checksum covers, before those of the page."""
_WORD = 0xFFFFFFFF

Sum = tuple[int, int]


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
    total, wrong_at, is_known_synced, begins_transaction = (s0, s1), None, same_boot, False
    step = _FRAME.size + page_bytes
    for at in range(_HEADER.size, len(log) - step + 1, step):
        page, pages, *rest = _FRAME.unpack_from(log, at)
        is_of_this_log = rest[:2] == salts
        if wrong_at is None:
            summed = log[at : at + _SUMMED] + log[at + _FRAME.size : at + step]
            total = _add(order, summed, total)
            if not is_of_this_log or total != tuple(rest[2:]):
                wrong_at = at
        elif is_of_this_log:  # Does it prove that the wrong one was written correctly once?
            if is_known_synced and pages:
                return wrong_at
            is_known_synced |= bool(pages) and page == 1 and begins_transaction
            begins_transaction = bool(pages)
    return None


def _add(order: str, data: bytes, to: Sum) -> Sum:
    s0, s1 = to
    for x, y in struct.iter_unpack(f"{order}II", data):
        s0 = (s0 + x + s1) & _WORD
        s1 = (s1 + y + s0) & _WORD
    return s0, s1
