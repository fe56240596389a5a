"""Feeds that end with their test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator

import pytest
from fake_feed import FakeFeed

from dlctl.wire.messages import Lease


@pytest.fixture
def feed_of() -> Iterator[Callable[..., FakeFeed]]:
    """Begins feeds, as `FakeFeed(answers, ...)`. No loader may leave a process behind."""
    made: list[FakeFeed] = []

    def begin(answers: Iterable[Lease | None], **options: bool) -> FakeFeed:
        made.append(FakeFeed(answers, **options))
        return made[-1]

    yield begin
    for feed in made:
        feed.close()
    assert not multiprocessing.active_children()
