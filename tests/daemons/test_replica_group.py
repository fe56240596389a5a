"""Groups of real processes, over gloo: they lose members, and go on in the same processes."""

from __future__ import annotations

import contextlib
import socket
import time

import numpy as np
import psutil
import pytest
from group_member import (
    COMES_S,
    CONT,
    HOST,
    KILL,
    LONG,
    STOP,
    BeginSum,
    HangInSum,
    Member,
    Members,
    SeemToHaveGpu,
    assert_is_sum_of,
    vector_of,
)

from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupWaits,
    JoinGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.wire import messages as m

LARGE = np.ones(4_000_000, np.float32)


def test_sums_are_the_same_bits_for_all_and_a_dead_member_is_in_none():
    with Members(3) as members:
        joined = members.join(1, members.all)
        assert [event.number for event in joined] == [0] * 3
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
        members.join(1, members.all, timeout_s=2.5)
        early, late = members.all
        early.reduce(1, vector_of(0))
        for _ in range(2):
            assert early.hears(GroupWaits).ranks == (1,)
        late.reduce(1, vector_of(1))
        results = [member.hears(Reduced) for member in members.all]
        assert_is_sum_of(results, members.all)


def test_a_wait_does_not_hold_up_the_next_generation():
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
        members.join(1, members.all, timeout_s=5.0)
        members.sum(1, members.all)
        members.all[stopped].signal(STOP)
        others = [member for member in members.all if member.slot != stopped]
        for member in others:
            member.reduce(1, vector_of(member.slot))
        members.join(2, others, timeout_s=5.0)
        assert_is_sum_of(members.sum(2, others), others)
        # It has missed a sum that counts: in the next group it notices, and ends.
        back = members.all[stopped]
        back.signal(CONT)
        members.join(3, others)
        ended = [*others, back]
        with contextlib.suppress(EOFError, ConnectionError, AssertionError):
            members.join(4, ended, timeout_s=6.0)
        back.process.join(10)
        assert back.process.exitcode == 3


@pytest.mark.parametrize("how", [KILL, STOP], ids=["killed", "stands still"])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_a_member_that_is_lost_among_the_parts_of_a_sum_is_in_none(how, parts):
    """The others are waiting for it in gloo, some of them while they compute."""
    with Members(3) as members:
        members.join(1, members.all, timeout_s=5.0)
        *others, lost = members.all
        for member, begun in zip(members.all, (4, 2, parts), strict=True):
            member.do(BeginSum(member.slot, begun))
        others[0].reduce(1, vector_of(0))
        lost.signal(how)
        begun_at = time.monotonic()
        members.join(2, others, timeout_s=5.0)
        for member in others:
            member.reduce(2, vector_of(member.slot))
        results = [member.hears(Reduced, generation=2) for member in others]
        assert results[0].vector.size == LONG
        assert_is_sum_of(results, others)
        assert time.monotonic() - begun_at < 4.0
        assert results[0].number == 1


def test_a_sum_that_is_begun_waits_for_a_slow_member_beyond_the_time_of_the_group():
    with Members(2) as members:
        members.join(1, members.all, timeout_s=2.5)
        early, late = members.all
        early.do(BeginSum(0, 4))
        early.reduce(1, vector_of(0))
        for _ in range(2):
            assert early.hears(GroupWaits).ranks == (1,)
        late.do(BeginSum(1, 1))
        late.reduce(1, vector_of(1))
        assert_is_sum_of([member.hears(Reduced) for member in members.all], members.all)


def assert_stands_still(member: Member) -> None:
    process, until = psutil.Process(member.process.pid), time.monotonic() + COMES_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        member.pipe.poll(0.05)


@pytest.mark.parametrize("hangs", [0, 2], ids=["with the store", "without the store"])
def test_one_that_hangs_in_the_midst_of_a_sum_is_given_up_in_the_time_of_the_group(hangs):
    """And not in that of gloo, which is half an hour. Who waits for the store of one that hangs
    hears when that is killed, as the coordinator does for its silence.
    """
    with Members(3) as members:
        members.join(1, members.all, timeout_s=5.0)
        members.all[hangs].do(HangInSum())
        for member in members.all:
            member.reduce(1, vector_of(member.slot))
        begun = time.monotonic()
        others = [member for member in members.all if member.slot != hangs]
        if hangs == 0:
            assert_stands_still(members.all[0])
            members.all[0].signal(KILL)
        for member in others:
            assert member.hears(GroupFailed).why == ""
        members.join(2, others, timeout_s=5.0)
        assert_is_sum_of(members.sum(2, others), others)
        assert time.monotonic() - begun < 15.0


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
            for member in here if generation % 4 else here[:2]:
                member.reduce(generation, LARGE)
            here[0].pipe.poll(float(rng.uniform(0.0, 0.03)))
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
        failed = alone.hears(GroupFailed)
        assert "rank 1" in failed.reason
        assert failed.why == m.UNMADE


@pytest.mark.parametrize("gpus", [("a", "b"), ("a", "a")], ids=["of their own", "one for both"])
def test_members_whose_nccl_fails_go_on_with_gloo(gpus):
    """Where a GPU is shared it is not tried."""
    with Members(2) as members:
        for member, gpu in zip(members.all, gpus, strict=True):
            member.wait()
            member.do(SeemToHaveGpu(gpu))
        if gpus[0] != gpus[1]:
            members.all[0].do(OpenStore(1))
            store = members.all[0].hears(StoreOpened).address
            for rank, member in enumerate(members.all):
                member.do(JoinGroup(1, rank, 2, store, 5.0))
            for member in members.all:
                failed = member.hears(GroupFailed)
                assert (failed.why, "NCCL error" in failed.reason) == (m.UNMADE, True)
        members.join(2, members.all)
        assert_is_sum_of(members.sum(2, members.all), members.all)


def test_a_rendezvous_that_cannot_be_reached_is_named_with_who_cannot_reach_it():
    with socket.create_server((HOST, 0)) as free:
        store = f"{HOST}:{free.getsockname()[1]}"
    with Members(1) as members:
        alone = members.all[0]
        alone.wait()
        alone.do(JoinGroup(1, 1, 2, store, 1.0))
        failed = alone.hears(GroupFailed)
        assert f"{HOST} to {store}" in failed.reason
        assert failed.why == m.UNMADE


def test_members_without_the_model_say_so_and_live():
    with Members(2) as members:
        members.join(1, members.all)
        for member in members.all:
            member.do(Reduce(1, vector_of(0), 1.0, 0, True, False, member.slot))
        assert {member.hears(GroupFailed).why for member in members.all} == {m.MODEL_LOST}
        members.join(2, members.all)
        assert_is_sum_of(members.sum(2, members.all), members.all)
