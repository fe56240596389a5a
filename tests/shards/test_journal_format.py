"""The bytes of a journal: what a crash leaves of the last sync is cut off, and damage before it is
found.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.shards.errors import Unusable
from dlctl.shards.journal_format import joined, pack, read_all


def record(number: int, size: int = 40) -> bytes:
    return b"".join(pack(number, {"updates": number, "fill": "x" * size}, []))


def numbers(data: bytes) -> list[int]:
    return [found.number for found in read_all(data)[0]]


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
        read_all(bytes(damaged))
