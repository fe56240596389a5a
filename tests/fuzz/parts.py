"""Inputs of several parts (the frames of a message, the files of a directory) as one."""

from __future__ import annotations

from collections.abc import Iterable

PARTS_MAX = 40
_LENGTH_BYTES = 4


def join(parts: Iterable[bytes]) -> bytes:
    """Each part behind its length, 4 bytes, little-endian."""
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)


def split(data: bytes) -> list[bytes]:
    """The parts of any bytes at all: a length that is too large means what there is."""
    parts: list[bytes] = []
    at = 0
    while at < len(data) and len(parts) < PARTS_MAX:
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        parts.append(data[begin:at])
    return parts
