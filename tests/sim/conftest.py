"""What the tests of simulated runs share."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from seeds import pool


@pytest.fixture(scope="session")
def cores() -> Iterator[ProcessPoolExecutor]:
    """All cores of this machine."""
    with pool() as executor:
        yield executor
