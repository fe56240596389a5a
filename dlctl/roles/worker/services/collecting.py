"""Collectives: sums over all replicas of the group, which is made anew when a member dies.

The coordinator says which generation of the group there is and who is in it; the driver makes it
and sums (`JoinGroup`, `Reduce`). A sum that fails is begun again in the next generation, from the
same vector; one that some members have finished, and some have not, is handed on to the latter
instead. So all members have the same results in the same order, whoever dies in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlctl import messages as m
from dlctl.algorithms.needs import Collective, Summed
from dlctl.errors import RemoteProtocolError
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    JoinGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.roles.worker.services.base import Phase
from dlctl.roles.worker.shard_client import Identity
from dlctl.vector import to_host

BROKEN = "group-broken"


class Collecting:
    """Serves `Collective`: one at a time."""

    def __init__(
        self,
        context: Context,
        name: str,
        identity: Identity,
        timeout_s: float,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        """timeout_s: so long the others are waited for in one sum. finished: called with each."""
        self.context = context
        self.name = name
        self.identity = identity
        self.timeout_s = timeout_s
        self.finished = finished
        self.generation = 0
        self.slots: tuple[int, ...] = ()
        """Of the members, by rank."""
        self.number = 0
        """Sums that are finished here."""
        self.rebuilt = 0
        self._joins = True
        """This replica has taken part in no sum yet."""
        self._is_ready = self._is_reducing = False
        self._store = 0, ""
        """The generation whose rendezvous was opened here, and where that is."""
        self._joined_to = 0
        """The generation that the driver was told of last."""
        self._need: Collective | None = None
        self._vector: m.Array | None = None
        self._result: Summed | None = None

    # ------------------------------------------------------------ the service

    def begin(self, need: Collective, now: float) -> None:
        self._need, self._result = need, None
        self._vector = np.array(to_host(need.vector), np.float32)
        if self.slots and self.identity.slot not in self.slots:
            self._tell_broken("it takes part again", now)

    def poll(self, now: float) -> tuple[bool, Summed | None]:
        if self._result is None and self._need is not None:
            self._reduce_if_ready(self._need)
        if self._result is None:
            return False, None
        self._need = None
        return True, self._result

    def _reduce_if_ready(self, need: Collective) -> None:
        if not self._is_ready or self._is_reducing:
            return
        assert self._vector is not None
        self._is_reducing = True
        weight = 0.0 if self._joins else need.weight
        self.context.do(Reduce(self.generation, self._vector, weight, need.step, joins=self._joins))

    def phase(self) -> Phase:
        others = tuple(f"worker-{slot}" for slot in self.slots if slot != self.identity.slot)
        if self._is_reducing:
            return Phase("summing", others)
        return Phase("waiting for its group", (COORDINATOR, *others))

    def deadline(self) -> float | None:
        return None

    def cancel(self) -> None:
        self._need = None

    # ------------------------------------------------------------ the group

    def on_group(self, message: m.Group, now: float) -> None:
        """A generation of the group; an older one may come late, or again.

        Raises RemoteProtocolError if it has no members.
        """
        if not message.slots:
            raise RemoteProtocolError("a group without members")
        if message.generation < self.generation:
            return
        is_new = message.generation > self.generation
        if is_new:
            self.generation, self.slots = message.generation, message.slots
            self._is_ready = self._is_reducing = False
            self.rebuilt += 1
            self.context.retries.drop(BROKEN)
        if self.identity.slot not in self.slots:
            self._note("")
        elif not message.store:
            if is_new:
                self.context.do(OpenStore(self.generation))
            elif self._store[0] == self.generation:
                self._note(self._store[1])  # It was lost on its way.
        else:
            self._note("")
            self._join(message.store)

    def _join(self, store: str) -> None:
        if self._is_ready or self.generation == self._joined_to:
            return
        self._joined_to = self.generation
        rank = self.slots.index(self.identity.slot)
        self.context.do(JoinGroup(self.generation, rank, len(self.slots), store, self.timeout_s))

    def _note(self, store: str) -> None:
        self.context.send(COORDINATOR, m.GroupNoted(self.name, self.generation, store))

    def on_store(self, event: StoreOpened) -> None:
        self._store = event.generation, event.address
        if event.generation == self.generation:
            self._note(event.address)

    def on_joined(self, event: GroupJoined, now: float) -> None:
        """What the driver has learned with it counts, whatever generation there is by now."""
        if event.missed is not None and event.number == self.number + 1:
            self._finish(event.missed, event.number)
        self.number = max(self.number, event.number)
        self._joins = (self._joins and not event.is_first) or event.rejoins
        self._is_ready = event.generation == self.generation

    def on_reduced(self, event: Reduced, now: float) -> None:
        """It counts, whatever generation there is by now: others may have gone on with it."""
        if event.number <= self.number and not self._joins:
            return
        self._is_reducing = False
        self._finish(event, event.number)

    def _finish(self, event: Reduced, number: int) -> None:
        is_counted = self._need is not None and not self._joins and event.step == self._need.step
        self.number, self._joins = number, False
        self._result = Summed(
            event.vector, event.weight, event.members, event.step, is_counted, event.joined
        )
        self.finished()

    def on_failed(self, event: GroupFailed, now: float) -> None:
        if event.generation != self.generation:
            return
        self._is_ready = self._is_reducing = False
        self._tell_broken(event.reason, now)

    def _tell_broken(self, reason: str, now: float) -> None:
        me = self.identity
        message = m.GroupBroken(me.slot, me.epoch, self.generation, reason[:200])
        self.context.ask(BROKEN, COORDINATOR, message, now)
