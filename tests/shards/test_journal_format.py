"""The bytes of a journal: what a crash leaves of the last sync is cut off, and damage before it is
found.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.shards.errors import Unusable
from dlctl.shards.journal_format import MAGIC, joined, pack, read_each


def record(number: int, size: int = 40) -> bytes:
    return b"".join(pack(number, {"updates": number, "fill": "x" * size}, []))


def numbers(data: bytes) -> list[int]:
    return [found.number for found in read_each([data])]


SYNCED = joined([record(1), record(2)])
LAST = joined([record(3), record(4), record(5)])


def test_records_of_several_syncs_are_read_in_order() -> None:
    assert numbers(SYNCED + LAST) == [1, 2, 3, 4, 5]


@given(st.integers(0, len(LAST) - 1), st.integers(1, 60), st.integers(0, len(LAST)))
def test_whatever_pages_of_the_last_sync_are_missing_the_earlier_ones_are_there(
    begin: int, size: int, end: int
) -> None:
    torn = bytearray(LAST)
    torn[begin : begin + size] = bytes(len(torn[begin : begin + size]))
    left = numbers(SYNCED + bytes(torn[:end]))
    assert left[:2] == [1, 2]
    assert left == list(range(1, 1 + len(left)))


@given(st.integers(0, len(SYNCED) - 1))
def test_damage_of_what_an_earlier_sync_has_written_is_an_error(at: int) -> None:
    damaged = bytearray(SYNCED + LAST)
    damaged[at] ^= 0xFF
    with pytest.raises(Unusable):
        numbers(bytes(damaged))


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@given(st.integers(1, 200), st.integers(0, len(LAST)))
def test_in_pieces_of_any_size_the_same_records_are_found(size: int, end: int) -> None:
    data = SYNCED + LAST[:end]
    assert [r.number for r in read_each(in_pieces(data, size))] == numbers(data)


@given(st.integers(1, 200), st.integers(0, len(SYNCED) - 1))
def test_in_pieces_of_any_size_damage_is_found(size: int, at: int) -> None:
    """Also if the magic bytes of the record behind it are in two of them."""
    damaged = bytearray(SYNCED + LAST)
    damaged[at] ^= 0xFF
    with pytest.raises(Unusable):
        list(read_each(in_pieces(bytes(damaged), size)))


def test_magic_bytes_alone_are_no_later_record() -> None:
    assert numbers(SYNCED + b"torn" + 3 * MAGIC) == [1, 2]


def test_no_more_is_read_than_the_record_that_is_asked_for() -> None:
    """A journal may be larger than the memory."""
    source = iter(in_pieces(SYNCED + LAST, len(record(1))))
    assert next(read_each(source)).number == 1
    assert sum(map(len, source)) == len(SYNCED + LAST) - len(record(1))
