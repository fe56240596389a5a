"""Reads that wait are looked at only where they may be answered."""

from __future__ import annotations

from dlctl.roles.server.held_fetches import HELD_FETCHES_MAX, AnyFetch, HeldFetches
from dlctl.wire import messages as m


def fetch(slot: int, request: int) -> m.Fetch:
    return m.Fetch(slot=slot, term=1, request=request, clock_min=0)


def test_after_a_push_only_the_reads_of_its_worker_are_looked_at() -> None:
    held, looked = HeldFetches(), list[tuple[int, int]]()
    for slot in range(50):
        held.hold(b"%d" % slot, fetch(slot, slot))

    def may_answer(each: AnyFetch) -> bool:
        looked.append((each.slot, each.request))
        return True

    assert [peer for peer, _ in held.take(may_answer, 7)] == [b"7"]
    assert looked == [(7, 7)]
    assert list(held.take(may_answer, 7)) == []
    assert [each.slot for _, each in held.take(may_answer)] == [*range(7), *range(8, 50)]


def test_reads_are_taken_in_the_order_in_which_they_came() -> None:
    held = HeldFetches()
    for slot, request in [(1, 5), (0, 3), (1, 6), (0, 4), (1, 5)]:
        held.hold(b"%d" % slot, fetch(slot, request))
    taken = [(each.slot, each.request) for _, each in held.take(lambda each: each.request != 3)]
    assert taken == [(1, 5), (1, 6), (0, 4)]
    held.forget(0)
    assert list(held.take(lambda _: True)) == []


def test_the_oldest_read_of_a_worker_makes_room() -> None:
    held = HeldFetches()
    for request in range(HELD_FETCHES_MAX + 2):
        held.hold(b"", fetch(0, request))
    found = [each.request for _, each in held.take(lambda _: True)]
    assert found == [*range(2, HELD_FETCHES_MAX + 2)]
