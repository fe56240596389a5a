"""A gradient that becomes too old while it is computed is stopped, and its batch comes next."""

from __future__ import annotations

import numpy as np
import pytest
from replica_of_needs import READ, SERVERS, Replica, replica

from dlctl.algorithms.base import Shape
from dlctl.algorithms.needs import Gradient, NextData
from dlctl.roles.protocol.effects import Compute, Computed, StopCompute
from dlctl.wire import messages as m


def stale_after(updates: int) -> tuple[Replica, list[m.Fetch]]:
    """A replica that computes, and what it asks the shards to find out that this is in vain."""
    at = replica(READ, NextData(), Gradient(stale_after=updates), NextData(), stops=True)
    for shard, fetch in enumerate(at.of(m.Fetch)):
        at.answer(shard, fetch, 0.0, version=10 + shard)
    at.lease(2)
    return at, at.of(m.Fetch)[SERVERS:]


def test_a_gradient_is_stopped_once_all_shards_are_so_many_updates_ahead() -> None:
    at, watched = stale_after(3)
    assert [fetch.clock_min for fetch in watched] == [13, 14]
    at.answer(0, watched[0], 0.0, clock=13)
    assert not at.of(StopCompute), "the other one would use it"
    at.answer(1, watched[1], 0.0, clock=14)
    ((computing,), (stop,)) = at.of(Compute), at.of(StopCompute)
    assert stop.ticket == computing.ticket
    at.training.on_event(Computed.of_stopped(np.zeros(0), 0.5), 0.0)
    at.advance()
    assert at.log[2] is None
    assert at.log[3].number == 0, "the same batch again"


def test_who_has_its_gradient_does_not_wait_for_the_news_any_more() -> None:
    at, watched = stale_after(3)
    keys = [("fetch", 0, shard, fetch.request) for shard, fetch in enumerate(watched)]
    assert all(key in at.context.retries for key in keys)
    assert not list(at.context.retries.waiting()), "the shards are to be late"
    at.computed()
    assert not any(key in at.context.retries for key in keys)


def test_a_stopped_gradient_tells_how_long_a_whole_one_takes() -> None:
    at, _ = stale_after(3)
    at.training.on_event(Computed.of_stopped(np.zeros(0), 0.25), 15.0)
    at.training.advance(15.0)
    assert at.side.step_s == 60.0
    assert at.training.is_at_work(), "again"
    assert at.training.stuck_s(15.0 + 20.0) == 0.0, "no hang, as far as is known"


def test_a_gradient_with_an_own_step_is_not_stopped() -> None:
    with pytest.raises(TypeError, match=r"takes no stale_after.*then OwnStep"):
        Gradient(step=True, gather=False, steps=2, stale_after=1)


def test_only_with_servers_a_gradient_becomes_too_old() -> None:
    alone = Shape(tables=())
    with pytest.raises(TypeError, match="counts the updates of servers, and this method has none"):
        replica(Gradient(stale_after=1), shape=alone)
