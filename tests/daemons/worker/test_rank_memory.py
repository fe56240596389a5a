"""The memory that the ranks of a replica share: what is given back, and what each has mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from daemons.worker.ranks.rank_memory import FREE, PARAMETERS, RankMemory, others

SIZE = 1 << 18
"""Elements: 1 MiB a vector."""
NAME = "dlctl-test-of-ranks"


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    yield fd
    os.close(fd)


def taken(fd: int) -> int:
    """Bytes of the host that the file has."""
    return os.fstat(fd).st_blocks * 512


def mapped() -> int:
    """Bytes of it that this process has in its own page tables."""
    maps = Path("/proc/self/smaps").read_text().split(f"/memfd:{NAME}")[1:]
    return sum(int(part.split("\nRss:")[1].split()[0]) * 1024 for part in maps)


def test_a_vector_that_is_cleared_takes_no_memory_and_the_others_stay(file: int) -> None:
    memory = RankMemory(file, SIZE)
    values = torch.arange(SIZE, dtype=torch.float32)
    for number in (PARAMETERS, FREE):
        memory.vector(number).copy_(values)
    assert taken(file) == 8 * SIZE
    memory.clear(FREE, 1000, SIZE)
    assert taken(file) == 4 * SIZE + mmap.PAGESIZE
    assert torch.equal(memory.vector(PARAMETERS), values)
    values[1000:] = 0
    assert torch.equal(memory.vector(FREE), values)
    memory.clear(FREE, 0, SIZE)
    assert taken(file) == 4 * SIZE


def test_who_lets_go_of_a_part_has_it_again_when_it_looks(file: int) -> None:
    memory = RankMemory(file, SIZE)
    values = torch.arange(SIZE, dtype=torch.float32)
    memory.vector(PARAMETERS).copy_(values)
    before = mapped()
    memory.free(PARAMETERS, [(SIZE // 2, SIZE)])
    assert mapped() == before - 2 * SIZE
    assert taken(file) == 4 * SIZE
    assert torch.equal(memory.vector(PARAMETERS), values)
    memory.free(PARAMETERS, [(1, mmap.PAGESIZE // 4 + 1)])  # No whole page.
    assert mapped() == before


def test_an_array_is_found_where_it_lies(file: int) -> None:
    memory = RankMemory(file, SIZE)
    array = memory.array(FREE, 5, 50)
    assert memory.place(array[3:]) == (FREE, 8)
    assert memory.place(array[::2]) is None
    assert memory.place(array.copy()) is None


def test_what_no_part_has() -> None:
    assert [*others([(6, 8), (0, 2), (1, 4)], 10)] == [(4, 6), (8, 10)]
    assert [*others([], 3)] == [(0, 3)]
    assert [*others([(0, 3)], 3)] == []
