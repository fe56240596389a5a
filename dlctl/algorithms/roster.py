"""Who counts on a shard, and from which clock on: for shard sides that wait for their replicas.

A shard side passes events to its roster, and asks it for whom to wait:

    self.roster = Roster()
    def push(...):     self.roster.count(push.slot, push.clock)        # or `rest`: it has no data
    def joined(...):   self.roster.join(slot, is_under_way=self.shard.version > 0)
    def members(...):  self.roster.meet(slots, self.shard.version)
    def state(...):    return self.roster.state();    def resume(...):  self.roster.resume(state)

A slot is waited for while it takes part and has a clock. The slots that begin with the run have the
clock of the shard at that moment. One that joins later has none until its first push, because the
shards may be at different clocks then; neither has one that rests.
"""

from __future__ import annotations

from dlctl.wire import messages
from dlctl.wire.messages import Json

IDLE = 2**40
"""The clock in a push of a replica that has no data: no replica waits for it."""
AHEAD_MAX = 2**32
"""Clocks. Shards may legitimately differ by some: a checkpoint is not of one moment. Without a
limit one push could take a shard to the largest clock."""


def absurd(push: messages.Push, clock: int) -> str:
    """Why no correct replica could push this to a shard at this clock; "" if one could. `IDLE` is
    never valid where a method does not use it.
    """
    if push.clock - clock <= AHEAD_MAX:
        return ""
    return f"it is for clock {push.clock}, and the shard is at {clock}"


class Roster:
    def __init__(self, newcomers: int | None = None) -> None:
        """newcomers: the clock of a slot that has just joined; None: it has none."""
        self.members: frozenset[int] = frozenset()
        """The slots that take part."""
        self._newcomers = newcomers
        self._clocks: dict[int, int | None] = {}
        """Slot -> its clock (None: it has none), also of slots that have left and may return."""
        self._is_new = True
        """The members are not known yet."""
        self.changes = 0
        """How often anything of it may have changed."""

    def clock_of(self, slot: int) -> int | None:
        return self._clocks.get(slot, self._newcomers)

    def count(self, slot: int, clock: int) -> None:
        """Count a slot from now on, with this clock."""
        self.changes += 1
        self._clocks[slot] = clock

    def rest(self, slot: int) -> None:
        """Do not count a slot until its next push."""
        self.changes += 1
        self._clocks[slot] = None

    def join(self, slot: int, *, is_under_way: bool) -> None:
        """A new process has the slot. If nothing has happened yet, it begins with the others."""
        self.changes += 1
        if is_under_way:
            self._clocks[slot] = self._newcomers

    def meet(self, slots: frozenset[int], clock: int) -> None:
        """These slots take part now, and no others; the first ones begin at this clock."""
        self.changes += 1
        if self._is_new:
            self._clocks = {**dict.fromkeys(slots, clock), **self._clocks}
        self._is_new, self.members = False, slots

    def counted(self) -> dict[int, int]:
        """Slot -> its clock, of those that are waited for."""
        clocks = ((slot, self.clock_of(slot)) for slot in self.members)
        return {slot: clock for slot, clock in clocks if clock is not None}

    def slowest(self, before: int) -> int:
        """The least clock that counts; never less than it was before."""
        return max(before, min(self.counted().values(), default=before))

    def state(self) -> Json:
        """{"clocks": [[slot, clock], ...]}; clock -1: none."""
        rows = sorted(self._clocks.items())
        return {"clocks": [[slot, -1 if clock is None else clock] for slot, clock in rows]}

    def resume(self, state: Json) -> None:
        """Restore the roster that returned `state`. One that died before it knew the members has no
        state.
        """
        self.changes += 1
        rows = state["clocks"] if "clocks" in state else state.get("due_from", [])  # As once named.
        self._clocks = {slot: None if clock < 0 else clock for slot, clock in rows}
        self._is_new = not rows
