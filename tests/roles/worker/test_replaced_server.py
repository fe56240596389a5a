"""Acks of a server that was replaced: its word does not count any more."""

from __future__ import annotations

import numpy as np
import pytest
from test_restored_residual import SIZE, Play

from dlctl.roles.protocol.effects import ArraysLoaded
from dlctl.wire import messages as m
from dlctl.wire.machine import Exit


@pytest.fixture
def play() -> Play:
    """A worker whose server has just been replaced; it has not joined the successor yet."""
    play = Play()
    play.joined(term=1)
    play.happens(ArraysLoaded({"residual": np.zeros(SIZE, np.float32)}, {}))
    play.hears(m.Moved(0, 2, "elsewhere", ""))
    return play


def fenced(term: int) -> m.Ack:
    return m.Ack(0, term, 0, m.FENCED, 0, 0, 0, "a newer term owns the slot")


def test_an_ack_of_a_replaced_server_is_ignored_as_soon_as_its_successor_is_known(
    play: Play,
) -> None:
    play.hears(fenced(term=1), "server-0")
    assert play.of(Exit) == []


def test_an_ack_of_its_successor_counts(play: Play) -> None:
    play.hears(fenced(term=2), "server-0")
    assert len(play.of(Exit)) == 1
