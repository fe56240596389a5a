"""Who has which portion: leases, backup copies, what was given back, and what is uncertain."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

Key = tuple[int, int]
"""A portion: data epoch and number."""


class Holders:
    """Every question is answered from an index: no event costs more with more workers."""

    def __init__(self, changed: dict[Key, None]) -> None:
        """changed: gets the portions whose holder has changed."""
        self._changed = changed
        self._leased: dict[Key, int] = {}
        self._copied: dict[Key, int] = {}
        """Leased portion -> the slot that has a backup copy of it. Not persisted: after a restart
        of the coordinator any worker's result is accepted."""
        self._returned: OrderedDict[Key, None] = OrderedDict()
        """In order of their keys."""
        self._uncertain: set[Key] = set()
        """Leased or returned according to a predecessor's records, which may be stale, or taken
        back from a live worker: another slot may have them, or they may be done."""
        self._leases_of: dict[int, dict[Key, None]] = {}
        self._copies_of: dict[int, dict[Key, None]] = {}
        self._under_way: dict[int, Counter[int]] = {}
        """Data epoch -> slot -> the number of its portions that are leased to it."""
        self._waiting: dict[int, int] = {}
        """Slot that waits for data -> its place in the queue."""
        self._queued = 0
        self._idle: set[int] = set()
        """Waiting slots that have no leased portion."""

    # ------------------------------------------------------------ questions

    @property
    def leased(self) -> Mapping[Key, int]:
        """Portion -> the slot that has it."""
        return self._leased

    @property
    def returned(self) -> Mapping[Key, None]:
        """The portions that wait to be leased again, in order."""
        return self._returned

    def first_returned(self) -> Key | None:
        return next(iter(self._returned), None)

    def count(self, slot: int) -> int:
        """The number of portions that are leased to a slot."""
        return len(self._leases_of.get(slot, ()))

    def is_idle(self, slot: int) -> bool:
        """Whether a slot has neither a portion nor a copy of one."""
        return slot not in self._leases_of and slot not in self._copies_of

    @property
    def waiting(self) -> Mapping[int, int]:
        """The slots that wait for data, in order."""
        return self._waiting

    def idle(self) -> list[int]:
        """The slots that wait for data and have nothing, in order."""
        return sorted(self._idle, key=self._waiting.__getitem__)

    def under_way(self, data_epoch: int) -> Counter[int]:
        """Slot -> the number of portions of this data epoch that are leased to it."""
        return Counter(self._under_way.get(data_epoch, ()))

    def is_copied(self, key: Key) -> bool:
        return key in self._copied

    def may_finish(self, slot: int, key: Key) -> bool:
        return key in self._uncertain or slot in (self._leased.get(key), self._copied.get(key))

    # ------------------------------------------------------------ changes

    def wait(self, slot: int) -> None:
        """A slot waits for data; it keeps its place if it does already."""
        if slot not in self._waiting:
            self._waiting[slot] = self._queued
            self._queued += 1
            self._notice(slot)

    def wait_no_more(self, slot: int) -> None:
        self._waiting.pop(slot, None)
        self._idle.discard(slot)

    def lease(self, key: Key, slot: int) -> None:
        self._returned.pop(key, None)
        self._uncertain.discard(key)
        if key in self._leased:
            self._take(key)
        self._give(key, slot)
        self._changed[key] = None

    def copy(self, key: Key, slot: int) -> None:
        """Lease a backup copy of a portion that another slot has."""
        self._copied[key] = slot
        self._copies_of.setdefault(slot, {})[key] = None
        self._notice(slot)

    def put_last(self, key: Key) -> None:
        """This portion, the last so far, waits for a slot that may have it."""
        self._returned[key] = None
        self._changed[key] = None

    def put_back(self, keys: list[Key]) -> None:
        """These portions, which nobody has, wait to be leased."""
        if keys:
            self._returned = OrderedDict.fromkeys(sorted([*self._returned, *keys]))

    def give_back(self, slot: int) -> list[Key]:
        """A slot does not work on what it has. Returns what is to be leased again."""
        for key in list(self._copies_of.get(slot, ())):
            self._drop_copy(key)
        mine = list(self._leases_of.get(slot, ()))
        back = sorted(key for key in mine if key not in self._copied)
        for key in mine:
            self._take(key)
            self._changed[key] = None
            if key in self._copied:
                self._give(key, self._drop_copy(key))
        self.put_back(back)
        return back

    def mark_uncertain(self, keys: list[Key]) -> None:
        """Any worker's report that these are done is accepted."""
        self._uncertain.update(keys)

    def forget(self, key: Key) -> None:
        """Remove a portion: no slot has it, and it is not leased again."""
        if key in self._leased:
            self._take(key)
        if key in self._copied:
            self._drop_copy(key)
        self._uncertain.discard(key)
        self._returned.pop(key, None)

    def recall(self, leased: dict[Key, int], returned: list[Key]) -> None:
        """What a predecessor's records say, to a new object."""
        for key, slot in leased.items():
            self._give(key, slot)
        self.put_back(returned)
        self._uncertain = {*leased, *returned}

    # ------------------------------------------------------------ the indices

    def _give(self, key: Key, slot: int) -> None:
        self._leased[key] = slot
        self._leases_of.setdefault(slot, {})[key] = None
        self._under_way.setdefault(key[0], Counter())[slot] += 1
        self._notice(slot)

    def _take(self, key: Key) -> None:
        slot = self._leased.pop(key)
        _discard(self._leases_of, slot, key)
        counts = self._under_way[key[0]]
        counts[slot] -= 1
        if not counts[slot]:
            del counts[slot]
        if not counts:
            del self._under_way[key[0]]
        self._notice(slot)

    def _drop_copy(self, key: Key) -> int:
        slot = self._copied.pop(key)
        _discard(self._copies_of, slot, key)
        self._notice(slot)
        return slot

    def _notice(self, slot: int) -> None:
        """A slot has got or lost something, or begins to wait."""
        if slot in self._waiting and self.is_idle(slot):
            self._idle.add(slot)
        else:
            self._idle.discard(slot)


def _discard(index: dict[int, dict[Key, None]], slot: int, key: Key) -> None:
    del index[slot][key]
    if not index[slot]:
        del index[slot]
