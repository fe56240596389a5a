"""The group of all replicas, for methods with collectives: who is in it, generation by generation.

A generation is made when a worker comes or goes, or when a member says that a sum has failed. Its
first member opens the rendezvous, and then all are told where that is. Who does not say that a sum
has failed, although the others do, has not taken part in it: it hangs, or is slow. The next
generation does without it, until it asks to take part again.
"""

from __future__ import annotations

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.coordinator.run_state import RunState

Member = tuple[int, int]
"""Slot and epoch."""
LATE_S = 1.0
"""After the first member has said that a sum has failed, the others are waited for so long."""


class Groups:
    def __init__(self, run: RunState) -> None:
        self.run = run
        self.is_wanted = "group" in run.algorithm.shape.links
        self.generation = 0
        """Of all coordinators of this run: no two groups have the same."""
        self.members: tuple[Member, ...] = ()
        self.left_out: set[Member] = set()
        self._store = ""
        self._broken: set[Member] = set()
        self._until: float | None = None

    def advance(self, now: float) -> None:
        """Make the next generation if another one is needed."""
        if not self.is_wanted or self.run.state in ("pending", "starting"):
            self._until = None
            return
        wanted = self._wanted()
        if not wanted:
            self._until = None
        self.left_out &= {(d.index, d.term) for d in self.run.members.of_role("worker")}
        late = set(self.members) & set(wanted) - self._broken
        is_over = self._until is not None and (now >= self._until or not late)
        if is_over and self._broken & set(wanted):
            self.left_out |= late
            wanted = self._wanted()
        if wanted and (wanted != self.members or is_over):
            self._begin(wanted, now)

    def _wanted(self) -> tuple[Member, ...]:
        slots = set(self.run.members.live_slots())
        rows = [(d.index, d.term) for d in self.run.members.of_role("worker") if d.index in slots]
        return tuple(row for row in rows if row not in self.left_out)

    def _begin(self, members: tuple[Member, ...], now: float) -> None:
        for name in self._names(self.members):
            self.run.context.retries.drop(("group", name))
        self.generation += 1
        self.members, self._store = members, ""
        self._broken, self._until = set(), None
        text = f"generation {self.generation}: {', '.join(self._names(members))}"
        self.run.context.event("group", "", text)
        self._tell(self._names(members)[:1], now)

    def _names(self, members: tuple[Member, ...]) -> list[str]:
        return [f"worker-{slot}" for slot, _ in members]

    def _tell(self, names: list[str], now: float) -> None:
        slots = tuple(slot for slot, _ in self.members)
        message = m.Group(self.generation, slots, self._store)
        for name in names:
            self.run.context.ask(("group", name), name, message, now)

    def on_noted(self, message: m.GroupNoted, now: float) -> None:
        if message.generation != self.generation or message.name not in self._names(self.members):
            return
        asked = self.run.context.retries.message(("group", message.name))
        if message.store and not self._store:
            self._store = message.store
            self._tell(self._names(self.members), now)
        elif isinstance(asked, m.Group) and asked.store:
            self.run.context.retries.done(("group", message.name), now)

    def on_broken(self, peer: Peer, message: m.GroupBroken, now: float) -> None:
        member = (message.slot, message.epoch)
        if self.run.members.worker(*member) is None:
            return
        self.left_out.discard(member)
        if message.generation != self.generation or member not in self.members:
            self.advance(now)
            return
        self._broken.add(member)
        if self._until is None:
            self._until = now + LATE_S
            text = f"worker-{message.slot}: {message.reason}"
            self.run.context.event("group", f"worker-{message.slot}", text)
        self.advance(now)

    def deadline(self) -> float | None:
        return self._until
