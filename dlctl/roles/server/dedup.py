"""Exactly once: which pushes of which worker a shard has accepted.

Per slot the shard stores the newest term that has joined and the next sequence number that it
expects. It accepts only that number: an older one is a duplicate (acknowledged again, not applied
again), a newer one means that a push was lost in flight (nothing is applied, the worker resends).
An older term belongs to a process that has been replaced: it is fenced.

The outcome of a push that was not applied is stored for as long as it may be resent: if the
ack was lost, the worker gets that outcome again, and not an ack as if the push were in the shard.

A push held by a barrier is accepted, but is only in this server's memory. So the state that is
stored with the shard (`to_json`) ends before the lowest held push, which is new to the next server.

All of this is in every commit, whose space in a mapped state is limited (`dlctl/shards/image.py`).
So the state per slot is bounded, whatever its worker does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dlctl.roles.protocol.limits import REACH
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE, FENCED, GAP, HELD, LATE, REFUSED, Push

PAST_KEPT = 32
"""Number of replaced terms whose progress is still stored."""
HELD_REACH = 4
"""Numbers accepted from a held one on; all methods that hold pushes wait sooner."""
NEW = "new"
UNKNOWN = "unknown"
_DROPPED = (DUPLICATE, LATE, REFUSED)
_ALL_OUTCOMES = 4**REACH - 1


@dataclass(slots=True)
class _Slot:
    slot: int
    term: int
    next_seq: int = 0
    held: set[int] = field(default_factory=set)
    """Numbers of pushes that are accepted and not settled."""
    ahead: set[int] = field(default_factory=set)
    """Beyond `next_seq`, and settled by a server that held a lower one when it died."""
    dropped: int = 0
    """The newest number that was not applied, if there is one."""
    outcomes: int = 0
    """Two bits for `dropped` and for each number before it, lowest bits first: an index into
    `_DROPPED`."""
    row: list[int] = field(default_factory=list)
    """The slot's row as in `to_json`; empty after a change."""

    def drop(self, seq: int, outcome: str) -> None:
        if seq > self.dropped:
            self.outcomes = self.outcomes << 2 * min(seq - self.dropped, REACH) & _ALL_OUTCOMES
            self.dropped = seq
        if seq > self.dropped - REACH:
            self.outcomes |= _DROPPED.index(outcome) << 2 * (self.dropped - seq)

    def outcome_of(self, seq: int) -> str:
        behind = self.dropped - seq
        return _DROPPED[self.outcomes >> 2 * behind & 3] if 0 <= behind < REACH else DUPLICATE


_NOBODY = _Slot(slot=-1, term=-1)
"""For a slot that no worker has joined with."""


class Dedup:
    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        """Slot -> which of its pushes were received, in ascending order."""
        self._past: deque[list[int]] = deque(maxlen=PAST_KEPT)
        """Rows of replaced terms, whose pushes are not accepted any more."""

    def join(self, slot: int, term: int) -> bool:
        """A worker joins or rejoins. True if this is a new term of the slot."""
        known = self._of(slot)
        if term <= known.term:
            return False
        if known is not _NOBODY:
            self._past.append(_row(known))
        self._slots = dict(sorted((self._slots | {slot: _Slot(slot, term)}).items()))
        return True

    def _of(self, slot: int) -> _Slot:
        return self._slots.get(slot, _NOBODY)

    def is_current(self, slot: int, term: int) -> bool:
        return term == self._of(slot).term

    def is_fenced(self, slot: int, term: int) -> bool:
        return term < self._of(slot).term

    def next_seq(self, slot: int) -> int:
        """The sequence number that the shard expects next from a slot."""
        return self._of(slot).next_seq

    def settled(self, slot: int) -> int:
        """Number of leading pushes of a slot's newest term that are settled without a gap."""
        known = self._of(slot)
        return min(known.held, default=known.next_seq)

    def judge(self, push: Push) -> str:
        """NEW, DUPLICATE, GAP, FENCED, or UNKNOWN for a term that has not joined."""
        known = self._of(push.slot)
        if push.term > known.term:
            return UNKNOWN
        if push.term < known.term:
            return FENCED
        if push.seq < known.next_seq or push.seq in known.ahead:
            return DUPLICATE
        has_space = known.next_seq < min(known.held, default=known.next_seq) + HELD_REACH
        return NEW if push.seq == known.next_seq and has_space else GAP

    def take(self, push: Push) -> None:
        """The push that was judged NEW is being applied, held, or refused permanently."""
        known = self._slots[push.slot]
        assert (push.term, push.seq) == (known.term, known.next_seq)
        known.next_seq += 1
        while known.next_seq in known.ahead:
            known.ahead.remove(known.next_seq)
            known.next_seq += 1
        known.row = []

    def settle(self, slot: int, term: int, seq: int, outcome: str) -> None:
        """An accepted, perhaps held, push is settled with this outcome, or HELD until later."""
        if not self.is_current(slot, term):
            return
        known = self._slots[slot]
        known.row = []
        if outcome == HELD:
            known.held.add(seq)
            return
        known.held.discard(seq)
        if outcome not in (APPLIED, BUFFERED):
            known.drop(seq, outcome)

    def outcome_of(self, push: Push) -> str:
        """The outcome of a push that was judged DUPLICATE; DUPLICATE if it is in the shard."""
        known = self._slots[push.slot]
        return HELD if push.seq in known.held else known.outcome_of(push.seq)

    def to_json(self) -> list[list[int]]:
        """[[slot, term, next_seq, settled beyond it ...], ...], without held pushes.

        The last row of a slot is its current term; earlier rows give the progress of older ones.
        Called at every commit, so unchanged rows are cached.
        """
        for known in self._slots.values():
            known.row = known.row or _row(known)
        return [*self._past, *[known.row for known in self._slots.values()]]

    def outcomes(self) -> list[list[int]]:
        """[[slot, newest number that was not applied, outcomes of it and of those before], ...]"""
        slots = self._slots.values()
        return [[known.slot, known.dropped, known.outcomes] for known in slots if known.outcomes]

    def load(self, rows: list[list[int]], outcomes: list[list[int]]) -> None:
        """Resume the state of another server of this shard."""
        newest = {row[0]: row for row in rows}
        self._past.extend(row for row in rows if row is not newest[row[0]])
        self._slots = {
            slot: _Slot(slot, term, next_seq, ahead=set(ahead))
            for slot, term, next_seq, *ahead in sorted(newest.values())
        }
        for slot, dropped, mask in outcomes:
            self._slots[slot].dropped, self._slots[slot].outcomes = dropped, mask

    def remember(self, rows: list[list[int]]) -> None:
        """Add rows of earlier terms from a checkpoint: none of them will return."""
        self._past.extend(rows)


def _row(known: _Slot) -> list[int]:
    if not known.held:
        return [known.slot, known.term, known.next_seq, *sorted(known.ahead)]
    first = min(known.held)
    settled = set(range(first, known.next_seq)) - known.held | known.ahead
    return [known.slot, known.term, first, *sorted(settled)]
