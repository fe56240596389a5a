"""A commit fits into what a mapped state has set aside for it, whatever the workers have done."""

from __future__ import annotations

import numpy as np
import pytest
from server_lives import Keeping, Life, at_work

from dlctl import registry
from dlctl.job.config import COUNT_MAX
from dlctl.roles.protocol.limits import REACH
from dlctl.roles.server.dedup import HELD_REACH, PAST_KEPT, Dedup
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED, HELD, REFUSED, Packed

HIGHEST = 2**32 - 1
"""Of terms, numbers of pushes, steps and counts."""


def push(slot: int, term: int, seq: int) -> m.Push:
    delta = Packed("none", 1, (np.zeros(1, np.float32),))
    return m.Push(slot, term, 1, seq, 0, 0, 0, 1, 0, delta)


def fill(deliveries: Dedup, slot: int, term: int) -> None:
    """All outcomes that are kept of a slot, and all numbers behind a held one."""
    held = deliveries.next_seq(slot) + REACH
    for seq in range(held - REACH, held + HELD_REACH):
        assert deliveries.judge(push(slot, term, seq)) == "new"
        deliveries.take(push(slot, term, seq))
        deliveries.settle(slot, term, seq, HELD if seq == held else REFUSED)


def fullest() -> Dedup:
    """With as many slots as a run may have, and as many terms that were replaced."""
    deliveries, first = Dedup(), HIGHEST - REACH - HELD_REACH
    replaced = range(COUNT_MAX - PAST_KEPT, COUNT_MAX)
    deliveries.load([[slot, HIGHEST - 1, first] for slot in replaced], [])
    for slot in replaced:
        fill(deliveries, slot, HIGHEST - 1)
        deliveries.join(slot, HIGHEST)
    past = [row for row in deliveries.to_json() if row[1] == HIGHEST - 1]
    deliveries = Dedup()
    deliveries.load([*past, *([slot, HIGHEST, first] for slot in range(COUNT_MAX))], [])
    for slot in range(COUNT_MAX):
        fill(deliveries, slot, HIGHEST)
    assert len(deliveries.to_json()) == COUNT_MAX + PAST_KEPT
    return deliveries


@pytest.mark.long
def test_there_is_room_for_all_that_the_workers_of_the_largest_run_may_have_done() -> None:
    """Also if the job has two, and the others have come with `dlctl scale`."""
    keeping, sync = Keeping(), registry.load("algorithms", "sync")
    first = at_work(keeping, algorithm=sync)
    serving = first.server.serving
    assert serving is not None
    serving.parameters.dedup = fullest()
    serving.parameters.refused.update(dict.fromkeys(range(COUNT_MAX), HIGHEST))
    serving.side.resume({"due_from": [[slot, HIGHEST] for slot in range(COUNT_MAX)]})
    serving.shard.version = HIGHEST
    serving.commit()
    second = Life(keeping, 2, keep=True, algorithm=sync).server.serving
    assert second is not None
    assert second.parameters.dedup.to_json() == serving.parameters.dedup.to_json()
    assert second.parameters.dedup.outcomes() == serving.parameters.dedup.outcomes()
    assert second.side.state() == serving.side.state()


def test_many_workers_whose_pushes_are_refused_do_not_end_a_server_of_a_job_of_two() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    slots, poison = range(150), (np.nan, 0, 0, 0)
    for slot in slots:
        life.join(slot)
        for seq in range(REACH):
            assert life.push(seq, poison, slot) == [(seq, REFUSED)]
        assert life.push(REACH, slot=slot) == [(REACH, APPLIED)]
    again = Life(keeping, 2, keep=True)
    for slot in slots:
        again.join(slot)
        assert again.push(REACH - 1, slot=slot) == [(REACH - 1, REFUSED)]


def test_the_state_of_a_small_run_is_not_large_for_that() -> None:
    keeping = Keeping()
    at_work(keeping)
    assert len(keeping.buffer) < 2**20
