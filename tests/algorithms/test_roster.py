"""Who counts on a shard: those that begin with it, those that join, rest, leave and return."""

from __future__ import annotations

import json

from dlctl.algorithms.roster import Roster


def slots(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def after_restart(roster: Roster, newcomers: int | None = None) -> Roster:
    """The roster of the next server, from what the commit of this one has kept."""
    other = Roster(newcomers)
    other.resume(json.loads(json.dumps(roster.state())))
    return other


def test_the_first_ones_count_from_the_shards_clock_and_later_ones_from_their_first_push() -> None:
    roster = Roster()
    roster.meet(slots(0, 1), 7)
    assert roster.counted() == {0: 7, 1: 7}
    roster.join(2, is_under_way=True)
    roster.meet(slots(0, 1, 2), 9)
    assert roster.counted() == {0: 7, 1: 7}
    roster.count(2, 9)
    assert roster.counted() == {0: 7, 1: 7, 2: 9}
    assert roster.slowest(0) == 7


def test_who_rests_or_is_replaced_is_not_waited_for_until_its_next_push() -> None:
    roster = Roster()
    roster.meet(slots(0, 1), 0)
    roster.rest(0)
    roster.join(1, is_under_way=True)
    assert roster.counted() == {}
    assert roster.slowest(5) == 5
    roster.count(1, 3)
    assert roster.counted() == {1: 3}
    assert roster.slowest(5) == 5


def test_a_process_replaced_before_anything_has_happened_begins_with_the_others() -> None:
    roster = Roster()
    roster.meet(slots(0, 1), 0)
    roster.meet(slots(0), 0)
    roster.join(1, is_under_way=False)
    roster.meet(slots(0, 1), 0)
    assert roster.counted() == {0: 0, 1: 0}


def test_a_push_ahead_of_the_members_is_not_forgotten_when_they_are_known() -> None:
    roster = Roster()
    roster.count(1, 4)
    roster.meet(slots(0, 1), 2)
    assert roster.counted() == {0: 2, 1: 4}


def test_with_a_clock_for_newcomers_all_count_but_those_that_rest() -> None:
    roster = Roster(newcomers=0)
    roster.meet(slots(0), 0)
    roster.meet(slots(0, 1, 2), 0)
    roster.rest(2)
    assert roster.counted() == {0: 0, 1: 0}
    assert after_restart(roster, newcomers=0).clock_of(2) is None
    roster.join(2, is_under_way=True)
    assert roster.counted() == {0: 0, 1: 0, 2: 0}


def test_the_next_server_counts_the_same_ones() -> None:
    roster = Roster()
    roster.meet(slots(0, 1, 2), 0)
    roster.count(1, 4)
    roster.rest(2)
    other = after_restart(roster)
    other.meet(slots(0, 1, 2), 6)
    assert other.counted() == roster.counted() == {0: 0, 1: 4}


def test_a_server_that_died_before_it_knew_the_members_leaves_it_to_the_next_one() -> None:
    other = after_restart(Roster())
    other.meet(slots(0, 1), 6)
    assert other.counted() == {0: 6, 1: 6}


def test_all_that_joined_late_stay_uncounted_over_a_restart() -> None:
    roster = Roster()
    roster.join(0, is_under_way=True)
    roster.meet(slots(0), 6)
    other = after_restart(roster)
    other.meet(slots(0), 6)
    assert other.counted() == roster.counted() == {}
    other.count(0, 6)
    assert other.counted() == {0: 6}


def test_a_state_of_an_earlier_version_is_read() -> None:
    roster = Roster()
    roster.resume({"due_from": [[0, 3], [1, -1]]})
    roster.meet(slots(0, 1), 5)
    assert roster.counted() == {0: 3}
