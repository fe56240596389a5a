"""Real runs of scripts, each in a place of its own, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workplace import Workplace, opened


@pytest.fixture
def place() -> Iterator[Workplace]:
    with opened() as workplace:
        yield workplace
