"""Who has which portion is the same by its indices as by going through all leases."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dlctl.roles.coordinator.pools.holders import Holders, Key

SLOTS = range(4)
EVENTS = ("lease", "lease", "copy", "done", "back", "uncertain", "wait", "no")


class Plain:
    """The same, without any index."""

    def __init__(self) -> None:
        self.leased: dict[Key, int] = {}
        self.copied: dict[Key, int] = {}
        self.returned: list[Key] = []
        self.uncertain: set[Key] = set()
        self.queue: list[int] = []

    def give_back(self, slot: int) -> list[Key]:
        self.copied = {key: owner for key, owner in self.copied.items() if owner != slot}
        mine = [key for key, owner in self.leased.items() if owner == slot]
        for key in mine:
            del self.leased[key]
            if key in self.copied:
                self.leased[key] = self.copied.pop(key)
        back = sorted(key for key in mine if key not in self.leased)
        self.returned = sorted(self.returned + back)
        return back


@given(st.data())
def test_an_index_never_differs_from_what_it_is_of(data: st.DataObject) -> None:
    changed: dict[Key, None] = {}
    holders, plain = Holders(changed), Plain()
    following = iter((epoch, portion) for epoch in range(20) for portion in range(3))
    for _ in range(data.draw(st.integers(0, 40))):
        slot = data.draw(st.sampled_from(SLOTS))
        match data.draw(st.sampled_from(EVENTS)):
            case "wait":
                holders.wait(slot)
                plain.queue += [slot] if slot not in plain.queue else []
            case "no":
                holders.wait_no_more(slot)
                plain.queue = [other for other in plain.queue if other != slot]
            case "lease":
                first = holders.first_returned()
                assert first == (plain.returned[0] if plain.returned else None)
                key = first or next(following)
                holders.lease(key, slot)
                plain.leased[key] = slot
                plain.returned = [other for other in plain.returned if other != key]
                plain.uncertain.discard(key)
            case "copy":
                alone = [key for key in plain.leased if key not in plain.copied]
                if alone and holders.is_idle(slot):
                    key = data.draw(st.sampled_from(alone))
                    holders.copy(key, slot)
                    plain.copied[key] = slot
            case "done" if known := [*plain.leased, *plain.returned]:
                key = data.draw(st.sampled_from(known))
                holders.forget(key)
                plain.leased.pop(key, None)
                plain.copied.pop(key, None)
                plain.uncertain.discard(key)
                plain.returned = [other for other in plain.returned if other != key]
            case "back":
                assert holders.give_back(slot) == plain.give_back(slot)
            case "uncertain":
                back = holders.give_back(slot)
                assert back == plain.give_back(slot)
                holders.mark_uncertain(back)
                plain.uncertain.update(back)
        compare(holders, plain)


def compare(holders: Holders, plain: Plain) -> None:
    assert holders.leased == plain.leased
    assert list(holders.returned) == plain.returned
    assert list(holders.waiting) == plain.queue
    assert holders.idle() == [slot for slot in plain.queue if holders.is_idle(slot)]
    for slot in SLOTS:
        owners = [*plain.leased.values(), *plain.copied.values()]
        assert holders.count(slot) == sum(owner == slot for owner in plain.leased.values())
        assert holders.is_idle(slot) == (slot not in owners)
    for epoch in {key[0] for key in plain.leased} | {99}:
        here = (owner for key, owner in plain.leased.items() if key[0] == epoch)
        assert holders.under_way(epoch) == Counter(here)
    for key in [*plain.leased, *plain.returned]:
        assert holders.is_copied(key) == (key in plain.copied)
        having = (plain.leased.get(key), plain.copied.get(key))
        may = [key in plain.uncertain or slot in having for slot in SLOTS]
        assert [holders.may_finish(slot, key) for slot in SLOTS] == may


def test_a_lease_that_changes_hands_is_told_of() -> None:
    changed: dict[Key, None] = {}
    holders = Holders(changed)
    holders.lease((0, 0), 1)
    holders.lease((0, 1), 1)
    assert list(changed) == [(0, 0), (0, 1)]
    changed.clear()
    holders.give_back(1)
    assert list(changed) == [(0, 0), (0, 1)]


def test_what_was_recorded_is_uncertain_until_it_is_leased_again() -> None:
    holders = Holders({})
    holders.recall({(0, 3): 2}, [(0, 1)])
    assert [holders.may_finish(7, key) for key in ((0, 1), (0, 3))] == [True, True]
    holders.lease((0, 1), 7)
    assert not holders.may_finish(2, (0, 1))
    holders.give_back(2)
    assert holders.may_finish(2, (0, 3)), "it may have been leased by records that were stale"
