"""The barrier of the shards: `Barrier` is its shard side, and this is how a replica keeps step:

    clock = yield from join()                      # takes part from this step on
    while True:
        ...                                        # compute
        yield Write(..., clock=clock)              # for this step, once
        clock = yield from next_step(clock)        # all shards have made it: read, go on

Each returns the step that this replica pushes for next. `join_chosen` and `next_chosen` are the
same where the lead chooses which pushes count (`quorum.Chosen`). The rules are those of the method
`sync`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from dlctl import outdated
from dlctl.algorithms.base import PushOutcome
from dlctl.algorithms.holding import HeldPush, HoldingSide
from dlctl.algorithms.needs import NextData, Read, View, Write
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import HELD, Json

Meeting = Generator[NextData | Read | Write, View, int]


def join() -> Meeting:
    """Take part without a gradient until all shards wait for this replica.

    In a run under way one shard may be a step ahead of another; a gradient is of one step.
    """
    yield NextData()  # A replica that has requested data is a member.
    view: View = yield Read(wait=True)
    return 0 if view.clock_max == 0 else (yield from meet(view.clock_max))


def next_step(clock: int) -> Meeting:
    """The step after this one. A shard that was notified late of the members may have skipped it
    without this replica, and be ahead of the others: then the replica meets all again.
    """
    view: View = yield Read(wait=True, at_least=clock + 1)
    newest = view.clock_max
    return newest if newest == clock + 1 else (yield from meet(newest))


def meet(clock: int) -> Meeting:
    """Take part without a gradient until the newest shard is exactly one step further. Then all
    shards are, as none is behind the requested step.
    """
    while True:
        yield Write(vector=None, clock=clock, holds_steps=False)
        view: View = yield Read(wait=True, at_least=clock + 1)
        before, clock = clock, view.clock_max
        if clock == before + 1:
            return clock


def join_chosen() -> Meeting:
    """Take part from the step on that all shards are at."""
    yield NextData()  # A replica that has requested data is a member.
    return (yield from meet_all(0))


def next_chosen(clock: int) -> Meeting:
    """The step that all shards are at after this one, whether this push counted or not."""
    return meet_all(clock + 1)


def meet_all(at_least: int) -> Meeting:
    """Read into the model until all shards are at the same step; returns it."""
    while True:
        view: View = yield Read(wait=True, at_least=at_least)
        if view.clock_min == view.clock_max:
            return view.clock_max
        at_least = view.clock_max


class Barrier(HoldingSide):
    """Holds the pushes of step t until those of all that count from this step on have arrived."""

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self._held: dict[tuple[int, int], HeldPush] = {}
        """(clock, slot) -> a push."""
        self._absent: set[int] = set()
        """The slots whose pushes the step `_absent_at` needs and does not have: found once for each
        step, since what a push costs must not grow with the workers."""
        self._absent_at = -1, -1
        """The step, and the roster's changes."""

    def _is_in_time(self, push: messages.Push) -> bool:
        """In time or not, its replica counts from now on."""
        if self.roster.clock_of(push.slot) is None:
            self.roster.count(push.slot, max(push.clock, self.shard.version))
        is_over = push.clock < self.shard.version
        return not is_over and (push.clock, push.slot) not in self._held

    def _hold(self, held: HeldPush) -> list[PushOutcome]:
        self._held[held.push.clock, held.push.slot] = held
        self._absent.discard(held.push.slot)
        return [held.outcome(HELD), *self._make_steps()]

    def joined(self, slot: int) -> list[PushOutcome]:
        if is_under_way := self.shard.version > 0 or bool(self._held):
            self._held = {key: held for key, held in self._held.items() if key[1] != slot}
        self.roster.join(slot, is_under_way=is_under_way)
        return self._make_steps()

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        self.roster.meet(slots, self.shard.version)
        return self._make_steps()

    def state(self) -> Json:
        return self.roster.state()

    def resume(self, state: Json) -> None:
        self.roster.resume(state)

    def _make_steps(self) -> list[PushOutcome]:
        done: list[PushOutcome] = []
        while self._is_complete(self.shard.version):
            clock = self._next_clock()
            if clock == self.shard.version:
                slots = sorted(slot for (c, slot) in self._held if c == clock)
                if not self.steps.may_make(clock, [self._held[clock, slot] for slot in slots]):
                    break
                done += self.steps.make([self._held.pop((clock, slot)) for slot in slots])
            else:
                self.shard.version = clock
        return done

    def _next_clock(self) -> int:
        """The first step from this one on that has a push, or from which on a slot counts.

        If this step is complete, so are all before that one, without a push. Skipping them one by
        one could take long: a push may name a step that is far ahead.
        """
        clocks = [*(clock for clock, _ in self._held), *self.roster.counted().values()]
        return min(clock for clock in clocks if clock >= self.shard.version)

    def _is_complete(self, clock: int) -> bool:
        """Whether no due slot is missing and some slot has pushed.

        A replica that has pushed for a later step will not push for this one any more: it joined
        when another shard was ahead of this one.
        """
        at = clock, self.roster.changes
        if self._absent_at != at:
            self._absent_at, self._absent = at, set(self._missing(self._newest(), clock))
        return not self._absent and bool(self._newest())

    def _newest(self) -> dict[int, int]:
        """Slot -> the latest step that a push of it is held for."""
        return {slot: c for c, slot in sorted(self._held) if slot in self.roster.members}

    def _missing(self, newest: dict[int, int], clock: int) -> frozenset[int]:
        due = (slot for slot, since in self.roster.counted().items() if since <= clock)
        return frozenset(slot for slot in due if newest.get(slot, -1) < clock)

    def waits_for(self) -> frozenset[int]:
        newest = self._newest()
        return self._missing(newest, self.shard.version) if newest else frozenset()


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
