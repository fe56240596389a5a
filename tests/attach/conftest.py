"""Real runs of scripts, each in a place of its own, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import fork_server
import pytest
from workplace import Workplace, opened


@pytest.fixture
def place() -> Iterator[Workplace]:
    fork_server.import_also("torch._dynamo")  # As the first optimiser of each script does.
    with opened() as workplace:
        yield workplace
