"""Groups of real processes, over gloo: they lose members, and go on in the same processes."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from group_member import CONT, KILL, STOP, Member, Members, assert_is_sum_of, vector_of

from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupWaits,
    JoinGroup,
    OpenStore,
    Reduced,
    StoreOpened,
)

LARGE = np.ones(4_000_000, np.float32)


def test_sums_are_the_same_bits_for_all_and_a_dead_member_is_in_none():
    with Members(3) as members:
        joined = members.join(1, members.all)
        assert [event.is_first for event in joined] == [True] * 3
        for number in (1, 2):
            results = members.sum(1, members.all)
            assert_is_sum_of(results, members.all)
            assert {result.number for result in results} == {number}
        dead, *others = members.all  # It has opened the store, too.
        for member in others:
            member.reduce(1, vector_of(member.slot))
        dead.signal(KILL)
        assert {event.number for event in members.join(2, others)} == {2}
        assert_is_sum_of(members.sum(2, others), others)


def test_who_waits_for_a_slow_member_says_so_and_does_not_fail():
    with Members(2) as members:
        members.join(1, members.all, timeout_s=1.0)
        early, late = members.all
        early.reduce(1, vector_of(0))
        for _ in range(2):
            assert early.hears(GroupWaits).ranks == (1,)
        late.reduce(1, vector_of(1))
        results = [member.hears(Reduced) for member in members.all]
        assert_is_sum_of(results, members.all)


def test_a_wait_is_given_up_at_once_when_the_next_generation_begins():
    with Members(2) as members:
        members.join(1, members.all)
        alone = members.all[0]
        alone.reduce(1, vector_of(0))
        begun = time.monotonic()
        members.join(2, [alone])
        assert_is_sum_of(members.sum(2, [alone]), [alone])
        assert time.monotonic() - begun < 3.0


def test_a_member_at_another_step_gives_nothing_whatever_it_brings():
    with Members(2) as members:
        members.join(1, members.all)
        members.all[0].reduce(1, vector_of(0), step=4)
        members.all[1].reduce(1, np.full(7, np.nan, np.float32), step=2)
        ahead, behind = (member.hears(Reduced) for member in members.all)
        assert np.array_equal(ahead.vector, vector_of(0))
        assert np.array_equal(behind.vector, vector_of(0))
        assert (ahead.weight, ahead.step) == (behind.weight, behind.step) == (1.0, 4)
        assert (ahead.is_counted, behind.is_counted) == (True, False)


@pytest.mark.parametrize("stopped", [0, 2], ids=["with the store", "without the store"])
def test_a_member_that_stands_still_holds_up_nobody_in_the_next_generation(stopped):
    with Members(3) as members:
        members.join(1, members.all, timeout_s=2.0)
        members.all[stopped].signal(STOP)
        others = [member for member in members.all if member.slot != stopped]
        for member in others:
            member.reduce(1, vector_of(member.slot))
        members.join(2, others, timeout_s=2.0)
        assert_is_sum_of(members.sum(2, others), others)
        # It has missed a sum that counts: in the next group it notices, and ends.
        back = members.all[stopped]
        back.signal(CONT)
        members.join(3, others)
        ended = [*others, back]
        with contextlib.suppress(EOFError, ConnectionError, AssertionError):
            members.join(4, ended, timeout_s=2.0)
        back.process.join(10)
        assert back.process.exitcode == 3


@pytest.mark.long
@pytest.mark.timeout(180)
def test_members_die_in_sums_twenty_times_over():
    """Before they have come to it, and in its midst; those who are left agree on what counts."""
    took_s, rng = [], np.random.default_rng(0)
    with Members(2) as members:
        for generation in range(2, 42, 2):
            members.all.append(Member(len(members.all)))
            here, dies = [*members.all[:2], members.all[-1]], members.all[-1]
            members.join(generation, here)
            assert_is_sum_of(members.sum(generation, here), here)
            # So the death falls now here, now there.
            vector = LARGE[: int(10 ** rng.uniform(3.0, 6.6))]
            for member in here if generation % 4 else here[:2]:
                member.reduce(generation, vector)
            dies.signal(KILL)
            died = time.monotonic()
            left = here[:2]
            before = {event.number for event in members.join(generation + 1, left)}
            assert len(before) == 1
            results = members.sum(generation + 1, left)
            assert_is_sum_of(results, left)
            assert {result.number for result in results} == {before.pop() + 1}
            took_s.append(time.monotonic() - died)
    print(f"from a death to the next sum: {np.median(took_s):.3f} s, at most {max(took_s):.3f} s")
    assert max(took_s) < 5.0


def test_a_group_that_cannot_be_made_fails_within_its_time():
    with Members(1) as members:
        alone = members.all[0]
        alone.wait()
        alone.do(OpenStore(1))
        store = alone.hears(StoreOpened).address
        alone.do(JoinGroup(1, 0, 2, store, 1.0))
        assert "rank 1" in alone.hears(GroupFailed).reason
