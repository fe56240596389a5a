"""Real processes, sockets and files: each test in a place of its own, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workplace import Workplace, opened


@pytest.fixture
def place() -> Iterator[Workplace]:
    """A place for jobs. That nothing is left when the test ends is part of every test."""
    with opened() as workplace:
        yield workplace


@pytest.fixture(scope="module")
def shared_place() -> Iterator[Workplace]:
    """One place for all tests of a module, which leave the job as they found it."""
    with opened() as workplace:
        yield workplace
