"""Real processes, sockets and files: each test in a place of its own, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workplace import Workplace


@pytest.fixture
def place() -> Iterator[Workplace]:
    """A place for jobs. That nothing is left when the test ends is part of every test."""
    workplace = Workplace()
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def shared_place() -> Iterator[Workplace]:
    """One place for all tests of a module, which leave the job as they found it."""
    workplace = Workplace()
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"
