"""Collectives: sums over all replicas of the group, which re-forms when a member dies.

The coordinator announces the generation of the group and its members; the driver forms the group
and sums (`JoinGroup`, `Reduce`). A sum that fails is repeated in the next generation, from the same
vector, unless all remaining members have its result, which is then committed (`sums.py`). So all
members have the same results in the same order, whichever member dies in between.

    no group -> opening the rendezvous or waiting for it -> joining -> ready <-> summing
                                         broken: until the coordinator announces a new generation
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dlctl.algorithms.needs import Collective, Summed
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import to_host
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    GroupWaits,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
)
from dlctl.roles.worker.services.base import Phase
from dlctl.roles.worker.shard_client import Identity
from dlctl.wire import messages as m

BROKEN = "group-broken"
PATIENCE = 3
"""Number of steps of a join or a sum, each of which the driver limits to `timeout_s`: after them
the driver itself hangs."""
BYTES_PER_S_MIN = 1e6
"""Lowest transfer rate of a vector, whose time is added to the timeout."""
REASON_CHARS_MAX = 200


@dataclass(eq=False)
class Collecting:
    """Serves `Collective`: one at a time."""

    context: Context
    name: str
    identity: Identity
    timeout_s: float
    """How long the others may be silent in a sum that all have begun."""
    begins: bool = field(default=False, kw_only=True)
    """This replica has the model that the run begins with or resumes from."""
    hands_on: bool = field(default=True, kw_only=True)
    """A joining replica gets the model from the others, not from servers."""

    def __post_init__(self) -> None:
        self._is_new = False
        """Nothing is trained yet (`Group.is_new`)."""
        self._is_over = False
        """This replica takes part in no more sums."""
        self.generation = 0
        self.slots: tuple[int, ...] = ()
        """The slots of the group's members, by rank."""
        self.number = 0
        """Sums that are finished here."""
        self._has_summed = False
        self._joins = not self.begins
        """This replica has taken part in no sum yet, and the others have trained without it."""
        self._is_behind = False
        """This replica has joined, but has not received the others' current model."""
        self._join_error = ""
        """Why the newest group could not be formed, until one is."""
        self.is_made = self._is_reducing = False
        """Whether the newest group is formed; whether a sum is in progress."""
        self._store = 0, ""
        """The generation whose rendezvous was opened here, and its address."""
        self._joined_to = 0
        """The generation that the driver was last asked to join."""
        self._missing: tuple[int, ...] | None = None
        """The slots that have not reached the current sum; None: all have, or it is unknown."""
        self._until: float | None = None
        """Deadline of the driver's answer, after which it counts as hung."""
        self._need: Collective | None = None
        self._vector: m.Array | None = None
        self._result: Summed | None = None

    # ------------------------------------------------------------ the service

    def begin(self, need: Collective, now: float) -> None:
        self._need, self._result = need, None
        # The sum may have to be repeated, and the method's vector may be the model itself.
        copied = None if need.given else True
        self._vector = np.array(to_host(need.vector), np.float32, copy=copied)
        if self.slots and self.identity.slot not in self.slots:
            self._report_broken("it takes part again", now)

    def poll(self, now: float) -> tuple[bool, Summed | None]:
        if self._until is not None and now >= self._until:
            self.context.do(LeaveGroup(self.generation))
            why = "" if self.is_made else m.UNMADE
            self._break("the group's thread does not answer", now, why)
        if self._result is None and self._need is not None:
            self._reduce_if_ready(self._need, now)
        if self._result is None:
            return False, None
        self._need = self._vector = None
        return True, self._result

    def _reduce_if_ready(self, need: Collective, now: float) -> None:
        if not self.is_made or self._is_reducing:
            return
        assert self._vector is not None
        self._is_reducing = True
        self._extend_deadline(now)
        self.context.do(
            Reduce(
                self.generation, self._vector, need.weight, need.step, self._joins,
                self._is_behind, self.identity.slot, need.beside, need.dtype,
            )
        )  # fmt: skip

    def _extend_deadline(self, now: float) -> None:
        """The driver is active: extend its deadline."""
        nbytes = 0 if self._vector is None else self._vector.nbytes
        self._until = now + PATIENCE * self.timeout_s + nbytes / BYTES_PER_S_MIN

    @property
    def has_model(self) -> bool:
        """Whether the replica, or the servers, have the group's current model."""
        return not self.hands_on or not (self._joins or self._is_behind)

    def phase(self) -> Phase:
        others = tuple(slot for slot in self.slots if slot != self.identity.slot)
        if self._join_error:
            return Phase(f"joining its group ({self._join_error})", _names(others))
        if self._is_reducing:
            if self._missing is None:
                return Phase("summing")
            return Phase("waiting for its group", _names(self._missing))
        if self._joined_to == self.generation > 0 and self._until is not None:
            return Phase("joining its group", _names(others))
        return Phase("waiting for its group", (COORDINATOR,))

    def deadline(self) -> float | None:
        return self._until

    def cancel(self) -> None:
        """The coordinator notifies the others and forms a group without this replica."""
        self._need = self._vector = self._until = None
        self.is_made = self._is_reducing = False
        self._is_over = True
        self.context.retries.drop(BROKEN)
        self.context.do(LeaveGroup(self.generation))

    # ------------------------------------------------------------ the group

    def on_group(self, message: m.Group, now: float) -> None:
        """Take a generation of the group; a stale one is ignored.

        Raises RemoteProtocolError if it has no members.
        """
        if not message.slots:
            raise RemoteProtocolError("a group without members")
        if message.generation < self.generation:
            return
        is_new = message.generation > self.generation
        if is_new:
            self.generation, self.slots = message.generation, message.slots
            self._is_new = message.is_new
            self._forget_sum()
            self.context.retries.drop(BROKEN)
        if self.identity.slot not in self.slots or self._is_over:
            self._note("")
            if is_new:
                self.context.do(LeaveGroup(self.generation))
        elif not message.store:
            if is_new:
                self.context.do(OpenStore(self.generation))
            elif self._store[0] == self.generation:
                self._note(self._store[1])  # The message was lost in flight.
        else:
            self._note("")
            self._join(message.store, now)

    def _forget_sum(self) -> None:
        self.is_made = self._is_reducing = False
        self._missing = self._until = None

    def _join(self, store: str, now: float) -> None:
        if self.generation == self._joined_to:
            return
        self._joined_to = self.generation
        rank = self.slots.index(self.identity.slot)
        self._extend_deadline(now)
        self.context.do(JoinGroup(self.generation, rank, len(self.slots), store, self.timeout_s))

    def _note(self, store: str) -> None:
        self.context.send(COORDINATOR, m.GroupNoted(self.name, self.generation, store))

    def on_event(
        self, event: StoreOpened | GroupJoined | Reduced | GroupWaits | GroupFailed, now: float
    ) -> None:
        match event:
            case StoreOpened(generation, address):
                self._store = generation, address
                if generation == self.generation:
                    self._note(address)
            case GroupJoined():
                self._on_joined(event, now)
            case Reduced():
                self._on_reduced(event)
            case GroupWaits(generation, ranks):
                # Some members still compute: stragglers are no failure, and have no deadline.
                if generation == self.generation and self._is_reducing:
                    slots = tuple(self.slots[rank] for rank in ranks if rank < len(self.slots))
                    self._missing = slots or None
                    self._extend_deadline(now)
            case GroupFailed(generation, reason, why):
                if generation == self.generation:
                    self._break(reason, now, why)

    def _on_joined(self, event: GroupJoined, now: float) -> None:
        """The group is formed. Its result counts even if it is stale: others continue from it."""
        if event.result is not None:
            self._on_reduced(event.result)
        self.number = event.number
        if not self._has_summed:
            begins = self.begins or self._is_new or not self.hands_on
            self._joins = event.number > 0 or not begins
        if event.generation == self.generation:
            self.is_made, self._until, self._join_error = True, None, ""

    def _on_reduced(self, event: Reduced) -> None:
        """Take a result, even of a stale generation: others may have continued from it."""
        if event.number != self.number + 1:
            return
        if event.generation == self.generation:
            self._is_reducing, self._missing, self._until = False, None, None
        is_handed = bool(event.weight) and self._need is not None and self._need.hands_on
        is_behind = not is_handed and (self._is_behind or not event.is_counted)
        self._is_behind = is_behind and self.hands_on
        self.number, self._joins, self._has_summed = event.number, False, True
        self._result = Summed(
            event.vector, event.weight, event.members, event.step, event.is_counted, event.joined,
            event.current, event.beside,
        )  # fmt: skip

    def _break(self, reason: str, now: float, why: str) -> None:
        self._join_error = reason[:REASON_CHARS_MAX] if why == m.UNMADE else ""
        self._forget_sum()
        self._report_broken(reason, now, why)

    def _report_broken(self, reason: str, now: float, why: str = "") -> None:
        me = self.identity
        text = reason[:REASON_CHARS_MAX]
        message = m.GroupBroken(me.slot, me.term, self.generation, text, why)
        self.context.ask(BROKEN, COORDINATOR, message, now)


def _names(slots: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"worker-{slot}" for slot in slots)
