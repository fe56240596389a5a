from collections.abc import Iterator

import pytest

from dlctl import kernels


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was found out about the library is found out again, in the test and after it."""
    caches = kernels._loaded, kernels._steps
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
